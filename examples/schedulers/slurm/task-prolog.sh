#!/bin/bash
# Slurm's TaskProlog (or `srun --task-prolog`): warns in the job's output where the plan does not name a node that the
# job was given. It looks at the hostfile that `penstock export --to sbatch` writes, and stays silent without one.
hostfile=${SLURM_SUBMIT_DIR:-.}/hostfile
[[ ${SLURM_LOCALID:-0} -eq 0 && -r $hostfile ]] || exit 0
grep -qxF -- "$SLURMD_NODENAME" "$hostfile" ||
  echo "print penstock: the plan does not name $SLURMD_NODENAME (at ${SLURM_TOPOLOGY_ADDR:-a place unknown to Slurm})"
