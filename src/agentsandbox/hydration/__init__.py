# SPDX-License-Identifier: Apache-2.0
"""Getting an image onto the node that will need it, before it is needed. Not there yet."""
