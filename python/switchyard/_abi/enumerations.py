# SPDX-License-Identifier: Apache-2.0
# Generated from include/switchyard/c by scripts/interface/generate.py; change the headers and run it.
"""Names and values of the enumerations of include/switchyard/c."""
from __future__ import annotations

BACKENDS = {"cpu": 0, "cuda": 1}
NETWORKS = {"sockets": 0, "mpi": 1, "nccl": 2}
DTYPES = {"bf16": 0, "f16": 1, "f32": 2, "fp8_e4m3": 3}
SCALES = {"none": 0, "f32": 1, "ue8m0": 2}
ACCUMULATIONS = {"exact": 0, "fast": 1}
LAYOUTS = {"rank_major": 0, "expert_major": 1}
STAGINGS = {"direct": 0, "ring": 1}
SIZES = {"exact": 0, "capacity": 1, "worst_case": 2, "automatic": 3}
OVERFLOWS = {"fail": 0, "drop_and_report": 1, "split": 2}
INVALID_IDS = {"raise": 0, "count": 1}
PADDINGS = {"zero": 0, "unspecified": 1}
ORDERS = {"per_rank": 0, "per_route": 1, "per_host": 2}
SCALE_ORDERS = {"row_major": 0, "column_major": 1}
SENDINGS = {"per_rank": 0, "per_route": 1}
TUNING_MODES = {"normal": 0, "low_latency": 1, "flat": 2, "ledger": 3, "normal_expert_major": 4}
STORAGES = {"packed": 0, "view": 1}
WEIGHT_ORDERS = {"nk": 0, "kn": 1}
EPILOGUES = {"none": 0, "relu": 1, "silu": 2, "swiglu": 3}
GRANULARITIES = {"block": 0, "per_channel": 1, "group_channel": 2}
OUTPUT_SCALINGS = {"per_group": 0, "fixed": 1, "per_row": 2}
MOE_EXCHANGES = {"automatic": 0, "normal": 1, "low_latency": 2}
MOE_FORMS = {"automatic": 0, "separate": 1, "fused": 2}
#: The tables by the C++ type that messages of the library name.
CPP_TYPES = {"Backend": BACKENDS, "HostNetwork": NETWORKS, "DType": DTYPES, "ScaleKind": SCALES, "Accumulate": ACCUMULATIONS,
             "Layout": LAYOUTS, "Staging": STAGINGS, "SizePolicy": SIZES, "Overflow": OVERFLOWS, "InvalidIds": INVALID_IDS,
             "Padding": PADDINGS, "CombineOrder": ORDERS, "ScaleOrder": SCALE_ORDERS, "Sending": SENDINGS, "TuningMode": TUNING_MODES,
             "WeightStorage": STORAGES, "WeightOrder": WEIGHT_ORDERS, "Epilogue": EPILOGUES, "ScaleGranularity": GRANULARITIES,
             "OutputScaling": OUTPUT_SCALINGS, "MoeExchange": MOE_EXCHANGES, "MoeForm": MOE_FORMS}
#: Bits of an element of each row type.
DTYPE_BITS = {0: 16, 1: 16, 2: 32, 3: 8}
