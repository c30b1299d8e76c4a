#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# sgl-deep-gemm 0.2.5 (SGLang's fork of DeepGEMM, with Mega MoE for Hopper) installs without complaint beside torch 2.11.0, but
# cannot be imported there.
#
# Expected: the wheel, tagged py3-none, states the torch version that its extension was built against as a requirement, or works
# with older versions.
# Seen: its metadata has no requirement on torch. With torch 2.11.0, import deep_gemm raises OSError "Could not load this library",
# because the extension refers to c10::cuda::CUDAErrorLogCapture, which torch 2.11.0 lacks; the message of torch does not say so.
# With torch 2.14.0 the extension loads.
# Needs Python 3.10 to 3.14 with venv, network access and 12 GB of disk, no GPU; nothing is installed outside a temporary folder. Fails
# if the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
changed=0
for torch in 2.11.0 2.14.0; do
  python3 -m venv "$torch"
  "$torch/bin/pip" -q install "torch==$torch" numpy sgl-deep-gemm==0.2.5 || { echo "cannot install torch $torch"; exit 2; }
  "$torch/bin/python" - >"$torch.txt" <<'PYTHON'
import ctypes
import importlib.metadata as metadata
import pathlib

import torch

package = metadata.distribution("sgl-deep-gemm")
print("requirements of", package.version, "on torch:", [each for each in package.requires or [] if each.startswith("torch")])
try:
    ctypes.CDLL(str(pathlib.Path(package.locate_file("deep_gemm/_C.so"))))
    print("torch", torch.__version__.split("+")[0], "loads")
except OSError as error:
    print("torch", torch.__version__.split("+")[0], str(error).rsplit(": ", 1)[-1])
PYTHON
  cat "$torch.txt"
  rm -rf "${torch:?}"
  grep -qF "requirements of 0.2.5 on torch: []" "$torch.txt" || changed=1
done
grep -qF "torch 2.11.0 _ZN3c104cuda19CUDAErrorLogCaptureC1Ev" 2.11.0.txt || changed=1
grep -qF "torch 2.14.0 loads" 2.14.0.txt || changed=1
if ((changed)); then echo "the behavior has changed"; exit 1; fi
