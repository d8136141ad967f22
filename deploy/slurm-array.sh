#!/usr/bin/env bash
# Measures all claims on a Slurm cluster: one shard per task of a job array, then a job that merges.
#
#   deploy/slurm-array.sh SHARDS [ARGUMENT OF PYTEST]...
#
# Run it on a login node; `make .venv/ready` must have run on a GPU node before. SBATCH_PARTITION,
# SBATCH_ACCOUNT and the other variables of sbatch apply. The results are in slurm/JOB/results.json,
# and the runs of the shards in slurm/JOB/1, slurm/JOB/2 and so on.
#SBATCH --job-name=pytest-aiperf
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm/%A-%a.log
set -euo pipefail

if [[ -z ${SLURM_ARRAY_TASK_ID:-} && ${1:-} != merge ]]; then # on the login node, or in a salloc
    shards=${1:?usage: deploy/slurm-array.sh SHARDS [ARGUMENT OF PYTEST]...}
    shift
    cd "$(dirname "$0")/.." # jobs start in the folder in which they were submitted
    mkdir -p slurm
    array=$(sbatch --parsable --array="1-$shards" --gpus=1 --cpus-per-task=8 --mem=64G \
        --time=4:00:00 deploy/slurm-array.sh "$@")
    array=${array%%;*} # a cluster's name may follow the number
    # afterany: the results of the other shards are merged even if one failed
    sbatch --dependency="afterany:$array" --time=10 --output="slurm/$array-merge.log" \
        deploy/slurm-array.sh merge "$array"
elif [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # a shard
    # exec: at the time limit, Slurm ends a shell at once, and pytest would have no time to write
    exec .venv/bin/python -m pytest --gpu --cpu \
        --shard="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
        -o aiperf_runs="slurm/$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID" "$@"
else # the last job
    .venv/bin/python -m pytest_aiperf merge "slurm/$2"/*/latest/results.json -o "slurm/$2/results.json"
    .venv/bin/python -m pytest_aiperf complete "slurm/$2"/*/
fi
