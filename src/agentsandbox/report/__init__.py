# SPDX-License-Identifier: Apache-2.0
"""From the result of a batch to files and lines that a person or a program reads."""

from __future__ import annotations

from agentsandbox.report.bias import BiasReport as BiasReport
from agentsandbox.report.bias import bias_lines as bias_lines
from agentsandbox.report.bias import bias_report as bias_report
from agentsandbox.report.html import html_report as html_report
from agentsandbox.report.html import journal_result as journal_result
from agentsandbox.report.html import result_of as result_of
from agentsandbox.report.summary import describe_environment as describe_environment
from agentsandbox.report.summary import record_row as record_row
from agentsandbox.report.summary import results as results
from agentsandbox.report.summary import summary_lines as summary_lines

__all__ = [
    "BiasReport",
    "bias_lines",
    "bias_report",
    "describe_environment",
    "html_report",
    "journal_result",
    "record_row",
    "result_of",
    "results",
    "summary_lines",
]
