#!/bin/bash
#SBATCH --job-name=longrope2
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=72:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

MODEL=meta-llama/Meta-Llama-3-8B
DATASET=/shared/dataset
RUN=/shared/llama3-8b-128k
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Every process of all nodes; started again, all of them, when one dies.
on_all() {
    srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 10 --rdzv-id "$SLURM_JOB_ID.$1" \
        --rdzv-backend c10d --rdzv-endpoint "$first:29500" -m longrope2 "$@"
}

on_all search "$MODEL" --target-length 128k -o "$RUN/search"
longrope2 data plan "$MODEL" --target-length 128k --tokens 10B --source "$DATASET" --cache "$RUN/cache" -o "$RUN/plan.jsonl"
on_all train "$MODEL" --factors "$RUN/search/factors.json" --plan "$RUN/plan.jsonl" --cache "$RUN/cache" \
    --batch-rows 64 --learning-rate 2e-5 --sequence-parallel 8 --save-every 20 -o "$RUN/train"
on_all evaluate "$RUN/train/model" --suite ruler,niah --lengths 4k,8k,16k,32k,64k,128k -o "$RUN/evaluation"
