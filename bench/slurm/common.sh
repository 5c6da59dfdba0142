# What the jobs of this folder share; sourced by them, from the root of the repository.
#
# Every part runs even if one before it failed; the job's exit code says whether any did. Results go to
# runs/slurm-<job>. The environment must hold odc with the extra for torch's CUDA (docs/gpu.md), and the examples'
# libraries, such as:
#     pip install -c constraints.txt '.[cuda13,examples]'

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

out=runs/slurm-$SLURM_JOB_ID
mkdir -p "$out"
gpus=${GPUS_PER_NODE:-8}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # head would end early, and scontrol by SIGPIPE
port=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a host must not share a port
status=0
numa=(--numa-binding node) # each rank to the processors beside its GPU; empty it where torchrun fails to do so

part() { # name, command...: note a failure and go on
    local name=$1
    shift
    echo "=== $name: $*"
    "$@" || { status=$?; echo "=== $name: exit code $status"; }
}

on_every_host() { # command...: once per host
    srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$@"
}

launch() { # torchrun's own arguments and the script: a rank per GPU, on all hosts of the job
    on_every_host --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" "${numa[@]}" \
        --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$port" "$@"
}

check_hosts() { # everything that one host can show; ranks 2 4 8 have a GPU each; further arguments: of odc bench gpu
    on_every_host bash -c \
        'odc bench gpu --ranks 2,4,8 --json "$0/gpu_check-$(hostname).json" "${@:1}"' "$out" "$@"
}

bandwidth() { # the primitives with NCCL beside them; further arguments as in odc bench primitives
    launch -m odc bench primitives --json "$out/bandwidth.json" "$@"
}

train() { # the same fine-tuning over NCCL and under ODC; compare losses and tokens/s in the two result.json
    part "training over NCCL" launch examples/long_context_sft.py --no-odc --out "$out/training-nccl" "${training[@]}"
    part "training under ODC" launch examples/long_context_sft.py --out "$out/training-odc" "${training[@]}"
}
