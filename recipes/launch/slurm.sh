#!/bin/bash
# One process a GPU, started by srun itself: signals reach every rank, and a rank that fails ends the job.
#   sbatch recipes/launch/slurm.sh recipe.yaml [key=value ...] [--resume]
#SBATCH --job-name=rise-rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@900
#SBATCH --output=%x-%j.out

set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# RANK and the rest differ from task to task, so they are set inside it.
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec .venv/bin/python -m rise_rl.cli train "$@"
' _ "$@"
