# Every entry of Siding, for Railway, which builds it by itself, and for any other host:
#
#   docker build -t siding .
#   docker run -e DATABASE_URL siding                                          # a worker
#   docker run -e DATABASE_URL siding deno run --quiet --no-prompt -P=migrate migrate.ts   # any other entry
#
# What each may do is in deno.json. What your jobs need, such as Python, is to be installed here.
FROM denoland/deno:2.9.6

WORKDIR /app

# The packages by themselves, so that a change of the code does not fetch them again.
COPY deno.json deno.lock ./
RUN deno install --frozen

# Transpiled here, once, and not by each replica when it starts. No entry imports jobs.ts and what it
# runs by name, so these are named too.
COPY . .
RUN deno cache --frozen --quiet worker.ts controller.ts web.ts recover.ts migrate.ts \
  schema_check.ts jobs.ts jobs/transcribe.ts jobs/watchdog.ts

# All of it is root's: neither a job nor an entry can change what runs.
USER deno

# A job's orphans become children of process 1, and tini sees them end.
ENTRYPOINT ["/tini", "--"]
CMD ["deno", "run", "--quiet", "--no-prompt", "-P=worker", "worker.ts"]
