# SPDX-License-Identifier: Apache-2.0
"""Support for models whose experts are divided among ranks. Private; ``parallelize`` contains the public functions.

find: experts modules and their call arguments. share: this rank's experts of one module, and the forward pass.
gradients: norms of expert gradients over all ranks. states: state dicts of models and optimizers. wrappers: DDP and FSDP.
Except for ``gradients``, modules of this package import torch only inside functions.
"""
