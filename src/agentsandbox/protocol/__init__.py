# SPDX-License-Identifier: Apache-2.0
"""Bytes in, events out: the language between the driver and the runner inside a sandbox. No I/O except in the runner."""
