# SPDX-License-Identifier: Apache-2.0
"""Isolated sandboxes for reinforcement learning of coding agents."""
