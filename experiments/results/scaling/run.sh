#!/usr/bin/env bash
# Writes scaling.csv beside it: dry runs of the table and the estimates in docs/scaling.md.
#
# bash experiments/results/scaling/run.sh      # minutes; the estimates need libtpu
set -euo pipefail
here=$(dirname "$0")
python=${PYTHON:-python}

describe() { # POD ROWS FLAGS...: a dry run with so many sequences per step
  "$python" -m experiments.train --config=small --dry_run="$1" --dry_run_log="$here/scaling.csv" \
    --config.model.context=1024 --config.model.vocab_size=50304 \
    --config.model.compute_dtype=bfloat16 --config.train.steps_per_dispatch=1 \
    --config.model.kernel=einsum \
    --config.train.batch_size="$2" "${@:3}"
}

small=(--config.model.d_model=768 --config.model.num_layers=12 --config.model.num_heads=12)
gpt2=("${small[@]}" --config.trials.seeds='(0,)')
large=(--config.model.d_model=2048 --config.model.num_layers=24 --config.model.num_heads=16
  --config.model.remat=full --config.trials.seeds='(0,)')
stack=("${small[@]}" --config.trials.seeds="($(seq -s, 0 31))")

weak() { # weak scaling of the 124M model, 8 sequences per device
  for devices in 1 2 4 8 16 32 64; do
    pod="h100-$((devices > 8 ? devices / 8 : 1))x$((devices > 8 ? 8 : devices))"
    describe "$pod" $((8 * devices)) "${gpt2[@]}" --config.mesh.data="$devices"
    if ((devices > 1)); then
      describe "$pod" $((8 * devices)) "${gpt2[@]}" --config.mesh.fsdp="$devices"
    fi
    if ((devices > 1 && devices <= 4)); then
      describe "$pod" $((8 * devices)) "${gpt2[@]}" --config.mesh.tensor="$devices"
    elif ((devices > 4)); then
      describe "$pod" $((8 * devices)) "${gpt2[@]}" --config.mesh.data=$((devices / 4)) \
        --config.mesh.tensor=4
    fi
  done
}

pods() { # 256 and 4,096 chips
  describe v6e-16x16 2048 "${gpt2[@]}" --config.mesh.data=256
  describe v6e-16x16 1024 "${large[@]}" --config.mesh.data=16 --config.mesh.fsdp=16
  describe v6e-16x16 64 "${stack[@]}" --config.mesh.trial=32 --config.mesh.data=8
  describe v5p-16x16x16 32768 "${gpt2[@]}" --config.mesh.data=4096
  describe v5p-16x16x16 16384 "${large[@]}" --config.mesh.data=256 --config.mesh.fsdp=16
  describe v5p-16x16x16 1024 "${stack[@]}" --config.mesh.trial=32 --config.mesh.data=128
}

for part in "${@:-weak pods}"; do
  for name in $part; do "$name"; done
done
