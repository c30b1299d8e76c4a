# SPDX-License-Identifier: Apache-2.0
"""The clone that contains the tests, unless they were copied elsewhere."""
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
