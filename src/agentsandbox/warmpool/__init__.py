# SPDX-License-Identifier: Apache-2.0
"""Warm sandboxes: who gets which, which to make next, and the engine that does it."""
