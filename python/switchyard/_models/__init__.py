# SPDX-License-Identifier: Apache-2.0
"""Support for models whose experts are divided among ranks. Private; ``parallelize`` contains the public functions.

find: experts modules and their call arguments. share: this rank's experts of one module, and the forward pass.
gradients: norms of expert gradients over all ranks. states: state dicts of models and optimizers. wrappers: DDP and FSDP.
replicas: positions of replicas, moves of their weights and gradients. replica_pass: the forward pass with replicas.
Except for ``gradients`` and ``replica_pass``, modules of this package import torch only inside functions.
"""
