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
  # The process alone, while it is still on its way to a group of its own.
  kill -TERM "-$job" || kill -TERM "$job"
  pause "$grace"
  kill -KILL "-$job"
}

# A sleep that a trap ends at once: a shell runs its traps after a command, but amid a `wait`.
pause() {
  sleep "$1" &
  wait "$!" || exit
}

# Whoever starts something here waits for its end: where the worker is process 1 of a container, nobody
# else would, and each would stay as a zombie.
put_out() {
  kill "-$1" "$2" && wait "$2"
}

# A shell that has just been forked loses a signal for which its parent has a trap (seen with dash, when
# two renewals came at once). So whoever waits below has a trap only for the signal that it gets, and
# ends what it started last with another: the watch USR1, its timer TERM, the timer's sleep KILL.
(
  before=$!
  trap '[ "$!" = "$before" ] || put_out TERM "$!"; exit' USR1
  timer=
  while read -r seconds; do
    [ ! -e overdue ] || continue # a renewal that comes too late stops no end that has begun
    [ -z "$timer" ] || put_out TERM "$timer"
    (
      before=$!
      trap '[ "$!" = "$before" ] || put_out KILL "$!"; exit' TERM
      pause "$seconds"
      mark overdue
      end_job
    ) &
    timer=$!
  done
  [ -z "$timer" ] || put_out TERM "$timer" # else it would call overdue what was ended by wish
  mark unwatched
  end_job
) <&3 3<&- >/dev/null 2>&1 &
watch=$!
exec 3<&-

{ wait "$job"; } 2>/dev/null # the shell would say "Killed" in the job's name
code=$?
# Children that the job left behind would run on, and hold its output open.
kill -KILL "-$job" 2>/dev/null
put_out USR1 "$watch" 2>/dev/null
[ ! -e unwatched ] || rm -rf "$PWD"
exit "$code"
