# SPDX-License-Identifier: Apache-2.0
"""Bytes in, events out: the language between driver and runner. Only the runner itself performs I/O."""
