#!/usr/bin/env bash
# What a team runs today: GPT-2 small on four nodes of one V100 each, twelve layers in four equal parts.
NODES=${SLURM_NNODES:-4}
PP_SIZE=4
MODEL_ARGS=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size $((NODES * 16))
    --pipeline-model-parallel-size $PP_SIZE
)
torchrun --nnodes "$NODES" --nproc-per-node 1 pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
