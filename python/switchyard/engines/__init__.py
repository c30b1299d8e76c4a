# SPDX-License-Identifier: Apache-2.0
"""Switchyard inside inference and training engines, through their own extension points. Importing this package imports no
engine and changes nothing; :mod:`switchyard.plugins` installs what environment variables request.
"""
