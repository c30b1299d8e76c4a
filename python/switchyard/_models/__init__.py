# SPDX-License-Identifier: Apache-2.0
"""Models whose experts are divided among ranks. Private; ``parallelize`` contains the public functions.

find: experts modules and the arguments of their calls. share: this rank's experts of one module, and its forward pass.
gradients: norms of experts' gradients over all ranks. states: state dicts of models and optimizers. wrappers: DDP and FSDP.
Modules of this package import torch only inside functions, except ``gradients``.
"""
