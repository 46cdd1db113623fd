# SPDX-License-Identifier: Apache-2.0
"""The program inside a sandbox: standard library only, Python 3.7 and later."""
