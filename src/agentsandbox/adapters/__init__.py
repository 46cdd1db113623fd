# SPDX-License-Identifier: Apache-2.0
"""Bridges to frameworks, one file each. None is imported by anything else; each needs the extra of its name."""
