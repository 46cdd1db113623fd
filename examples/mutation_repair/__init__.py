# SPDX-License-Identifier: Apache-2.0
"""Repair seeded mutants of a real project, with rewards that are known beforehand."""
