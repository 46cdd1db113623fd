# SPDX-License-Identifier: Apache-2.0
"""What tests need: the backend contract as functions, and faults to order."""
