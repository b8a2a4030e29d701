#!/bin/bash
#SBATCH --job-name=digen
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#
# sbatch slurm.sh CONFIG [--section.field VALUE ...]
#
# One raylet a node, the head on the first, and there the driver. The ranks are no Slurm tasks: digen starts them as
# actors, as many as the config's workers.ranks or workers.gpus says. run.output must be on a shared file system.
set -euo pipefail

export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN

port=6379
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

srun --nodes=1 --ntasks=1 --overlap -w "$head" \
  ray start --head --node-ip-address="$address" --port=$port --include-dashboard=false --block &
until srun --nodes=1 --ntasks=1 --overlap -w "$head" ray health-check --address "$address:$port"; do sleep 1; done

for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 --overlap -w "$node" ray start --address="$address:$port" --block &
done

export RAY_ADDRESS="$address:$port"
srun --nodes=1 --ntasks=1 --overlap -w "$head" digen train "$@" --workers.type ray
