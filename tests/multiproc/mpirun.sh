#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# mpirun.sh MPIRUN PROCESSES PROGRAM...: as CI runs it, as root and with fewer cores than processes.
set -euo pipefail
mpirun=$1 processes=$2
shift 2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec "$mpirun" -n "$processes" --oversubscribe --mca btl_vader_single_copy_mechanism none "$@"
