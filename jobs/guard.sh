#!/bin/sh
# Runs a job's command and ends it, children included, when its worker cannot: because it died, or
# because it is frozen past the deadline of the job's lease. The worker starts this, not the job, so
# that there is no moment in which the job runs unguarded.
#
#     guard.sh GRACE COMMAND [ARGUMENT …]
#
# In the job's folder, which has job.json for its stdin. On stdin, from the worker: a number a line,
# the seconds until the deadline, each in place of the one before; its end, by the worker's wish or
# by its death, ends the job: SIGTERM, and SIGKILL after GRACE seconds. Exit code: the job's, or
# 128 + n after signal n. A job that the deadline ended leaves the file `overdue`; when stdin ended
# first, the folder is removed.

grace=$1
shift
# Its own: the job's may lead nowhere.
job_path=$PATH
PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:$PATH

exec 3<&0
# A session of its own, so a process group: its number is the job's pid.
if setsid=$(command -v setsid); then
  PATH=$job_path "$setsid" "$@" <job.json 3<&- &
else # macOS
  PATH=$job_path perl -e 'use POSIX; POSIX::setsid(); exec @ARGV or exit 127' "$@" <job.json 3<&- &
fi
job=$!

# Not `:`, whose failed redirection (a full disk, a folder that is gone) would end the shell.
mark() {
  true >"$1"
}

end_job() {
  kill -TERM "-$job"
  sleep "$grace"
  kill -KILL "-$job"
}

# Whoever starts something here waits for its end: where the worker is process 1 of a container, nobody
# else would, and each would stay as a zombie.
put_out() {
  [ -z "$1" ] || { kill "$1" && wait "$1"; }
}

(
  timer=
  trap 'put_out "$timer"; exit' TERM
  while read -r seconds; do
    put_out "$timer"
    (
      nap=
      trap 'put_out "$nap"; exit' TERM
      sleep "$seconds" &
      nap=$!
      wait "$nap" || exit
      trap - TERM
      mark overdue
      end_job
    ) &
    timer=$!
  done
  mark unwatched
  end_job
) <&3 3<&- >/dev/null 2>&1 &
watch=$!
exec 3<&-

{ wait "$job"; } 2>/dev/null # the shell would say "Killed" in the job's name
code=$?
# Children that the job left behind would run on, and hold its output open.
kill -KILL "-$job" 2>/dev/null
# What waits above, with its sleeps: this shell leads their process group.
trap '' TERM
kill -TERM 0
wait "$watch"
[ ! -e unwatched ] || rm -rf "$PWD"
exit "$code"
