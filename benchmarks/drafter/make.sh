#!/usr/bin/env bash
# Makes data and a drafter for smollm2-135m, then measures it; 12 to 13 minutes of one H200.
#   benchmarks/drafter/fetch.sh FOLDER && benchmarks/drafter/make.sh FOLDER
# A run that is cut off goes on when the script is started again.
set -euo pipefail
folder=${1:?"usage: make.sh FOLDER"}
resume=()
[ -d "$folder/smollm2-135m-dflash/checkpoints" ] && resume=(--resume)

jaxspec train data --output "$folder/data" --topics "$folder/index.noun" \
  --num-prompts "${CONVERSATIONS:-60000}" --max-minutes "${DATA_MINUTES:-6}"
jaxspec train --data "$folder/data" --output "$folder/smollm2-135m-dflash" \
  --num-layers "${LAYERS:-3}" --block-size "${BLOCK:-8}" --loss "${LOSS:-dpace}" \
  --batch-rows 16 --num-anchors 256 --learning-rate 1e-3 \
  --max-minutes "${TRAIN_MINUTES:-5}" "${resume[@]}"
for set in "$(dirname "$0")/held-out.prompts.jsonl" "$folder/human-eval.prompts.jsonl"; do
  jaxspec bench acceptance --drafter ngram --drafter "$folder/smollm2-135m-dflash" --prompts "$set" \
    --limit 128 --max-tokens 256 --max-num-seqs 32 --temperature 0 --temperature 1
done
