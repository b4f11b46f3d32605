#!/usr/bin/env bash
# Makes the data and the drafter that ships for smollm2-135m. About 12 minutes of one H200.
#   benchmarks/drafter/fetch.sh FOLDER && benchmarks/drafter/make.sh FOLDER
# A run that is cut off goes on when the script is started again.
set -euo pipefail
folder=${1:?"usage: make.sh FOLDER"}
resume=()
[ -d "$folder/smollm2-135m-dflash/checkpoints" ] && resume=(--resume)

jaxspec train data --output "$folder/data" --topics "$folder/index.noun" \
  --num-prompts 60000 --max-num-seqs 512 --part-size 8192
jaxspec train --data "$folder/data" --output "$folder/smollm2-135m-dflash" \
  --num-layers 3 --block-size 8 --batch-rows 16 --num-anchors 256 --learning-rate 1e-3 \
  --max-minutes 5 "${resume[@]}"
python3 benchmarks/drafter/evaluate.py --drafter "$folder/smollm2-135m-dflash" \
  --chat "$folder/data/held-out-00000.prompts.jsonl" --code "$folder/human-eval.jsonl"
