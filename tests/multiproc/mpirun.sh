#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# mpirun.sh MPIRUN PROCESSES[,PROCESSES...] PROGRAM...: runs mpirun as CI does, as root and with fewer cores than processes;
# with several numbers, one run after the other. Provides suites with a folder for communication between their ranks.
set -euo pipefail
mpirun=$1 all=$2
shift 2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for processes in ${all//,/ }; do
  folder=$(mktemp -d "${TMPDIR:-/tmp}/switchyard-test-XXXXXX")
  trap 'rm -rf "$folder"' EXIT
  # Rendezvous address of a group's ranks: a port that belongs to this run.
  export SWITCHYARD_STORE=tcp://127.0.0.1:$((20000 + $$ % 10000)) SWITCHYARD_TEST_TEAM=$folder
  "$mpirun" -n "$processes" --oversubscribe --mca btl_vader_single_copy_mechanism none "$@"
  rm -rf "$folder"
done
