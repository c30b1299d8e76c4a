# SPDX-License-Identifier: Apache-2.0
"""Python bindings of the C ABI: the shared library, its structs and enumerations, and array conversion. Private; never imports
torch."""
