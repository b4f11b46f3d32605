#!/usr/bin/env bash
# Makes data and a drafter for smollm2-135m, then measures it; about 16 minutes of one H200.
#   benchmarks/drafter/fetch.sh FOLDER && benchmarks/drafter/make.sh FOLDER
# INIT=FOLDER goes on from a drafter. A run that is cut off goes on when the script is started again.
set -euo pipefail
folder=${1:?"usage: make.sh FOLDER"}
more=()
[ -n "${INIT:-}" ] && more+=(--init-from "$INIT")
if [ -d "$folder/smollm2-135m-dflash/checkpoints" ]; then
  more+=(--resume)
else
  jaxspec train data --output "$folder/data" --topics "$folder/index.noun" \
    --num-prompts "${PROMPTS:-2000000}" --max-minutes "${DATA_MINUTES:-5.5}" --sampled-share 0.25
fi
jaxspec train --data "$folder/data" --output "$folder/smollm2-135m-dflash" \
  --num-layers "${LAYERS:-3}" --block-size "${BLOCK:-8}" --loss "${LOSS:-dpace}" \
  --batch-rows 16 --num-anchors 256 --learning-rate 1e-3 --ema 0.998 \
  --max-minutes "${TRAIN_MINUTES:-8}" "${more[@]}"
for set in "$(dirname "$0")/held-out.prompts.jsonl" "$folder/human-eval.prompts.jsonl"; do
  jaxspec bench acceptance --drafter ngram --drafter "$folder/smollm2-135m-dflash" --prompts "$set" \
    --limit 128 --max-tokens 256 --max-num-seqs 32 --temperature 0 --temperature 1
done
