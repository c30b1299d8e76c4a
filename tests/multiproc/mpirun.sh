#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# mpirun.sh MPIRUN PROCESSES PROGRAM...: as CI runs it, as root and with fewer cores than processes.
set -euo pipefail
mpirun=$1 processes=$2
shift 2
# Where ranks of a group meet: a port of this run.
export SWITCHYARD_STORE=tcp://127.0.0.1:$((20000 + $$ % 10000))
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec "$mpirun" -n "$processes" --oversubscribe --mca btl_vader_single_copy_mechanism none "$@"
