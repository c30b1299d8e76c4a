# SPDX-License-Identifier: Apache-2.0
"""The C ABI from Python: the shared library, its structs and enumerations, and conversion of arrays. Private; never imports
torch."""
