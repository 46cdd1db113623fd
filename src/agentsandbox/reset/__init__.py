# SPDX-License-Identifier: Apache-2.0
"""Making a used sandbox indistinguishable from a fresh one."""
