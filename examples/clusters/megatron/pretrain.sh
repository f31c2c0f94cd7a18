#!/usr/bin/env bash
# What a team runs today: GPT-2 small on four nodes of one V100 each, twelve layers in four equal parts.
torchrun --nnodes 4 --nproc-per-node 1 pretrain_gpt.py \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \
    --pipeline-model-parallel-size 4 \
    --micro-batch-size 4 --global-batch-size 64
