# SPDX-License-Identifier: Apache-2.0
"""Parts that several modules of the package share. Not a public interface."""
