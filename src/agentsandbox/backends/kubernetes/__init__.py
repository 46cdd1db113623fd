# SPDX-License-Identifier: Apache-2.0
"""Pods as sandboxes. Nothing here imports a Kubernetes client before a cluster is asked for."""
