# SPDX-License-Identifier: Apache-2.0
"""Frozen records: what is asked for and what came of it. No behaviour beyond validation and derived values."""
