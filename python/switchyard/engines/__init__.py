# SPDX-License-Identifier: Apache-2.0
"""Plug-ins for inference and training engines, through the engines' own extension points. Importing this package imports no
engine and changes nothing; :mod:`switchyard.plugins` installs the plug-ins that environment variables request.
"""
