#!/bin/sh
# The job kind `pack`: compresses the files it is given, and says what their SHA-256 was before.
#
# It has no use for the job on stdin: its files are in in/0/, in/1/, …, one in each. What it leaves in out/
# are its output files. To stdout one JSON object a line, and nothing else: how far it is, and last the result.
# Any command that fails ends it without one; the job is tried again then, and its error has the end of
# stderr. Where the disk has less than MIN_FREE_KB left it asks to be tried again in a minute, which counts as
# no failure.

set -eu
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
if [ "$free_kb" -lt "${MIN_FREE_KB:-0}" ]; then
  echo '{"retry_after_s": 60}'
  exit
fi

count=$(ls in 2>/dev/null | wc -l)
if [ "$count" -eq 0 ]; then
  echo '{"error": "pack takes at least one file; this job has none", "retry": false}'
  exit
fi

sums=
n=0
while [ "$n" -lt "$count" ]; do
  # In thousandths, since a shell has whole numbers alone; printf puts the point in.
  printf '{"stage": "pack", "progress": 0.%03d}\n' $((n * 1000 / count))
  mkdir "out/$n" # two files may have one name
  for file in "in/$n/"*; do
    sum=$(sha256sum <"$file" | cut -d ' ' -f 1)
    sums="$sums${sums:+, }\"$sum\""
    gzip -c "$file" >"out/$n/${file##*/}.gz"
  done
  n=$((n + 1))
done
# By their numbers and not by their names, which would have to be written as JSON.
echo "{\"result\": {\"sha256\": [$sums]}}"
