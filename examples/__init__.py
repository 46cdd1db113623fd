# SPDX-License-Identifier: Apache-2.0
"""Programs that show how the library is used."""
