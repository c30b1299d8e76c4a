# SPDX-License-Identifier: Apache-2.0
"""The C ABI from Python: the shared library, its structs and enumerations, and arrays as it takes them. Private; never imports torch."""
