/** PgBouncer in transaction mode before a test's server, where it is installed. */
import { waitFor } from "./wait.ts";

const PATH = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"].find((path) => {
  try {
    return Deno.statSync(path).isFile;
  } catch {
    return false;
  }
});

/** Its version, such as 1.18; null where it is not installed. */
export const pgbouncerVersion: string | null = PATH === undefined ? null : (() => {
  const { stdout } = new Deno.Command(PATH, { args: ["--version"] }).outputSync();
  return /PgBouncer (\d+\.\d+)/.exec(new TextDecoder().decode(stdout))![1];
})();

/** What a test's name says when it is skipped for want of PgBouncer. */
export const missingNote = PATH ? "" : " (skipped: pgbouncer is not installed)";

export interface PgBouncer extends AsyncDisposable {
  /** Reaches the database by way of the pooler; its statements are not to be prepared. */
  url: string;
  /** Its own console, a database that takes `show pools` and the like, by the simple protocol. */
  console: string;
  log(): string;
  stop(): Promise<void>;
  /** Starts it again after {@linkcode stop}, on the same port. */
  start(): Promise<void>;
}

/**
 * Starts PgBouncer before the server of `url`. It runs as nobody, since it refuses to run as root.
 *
 * @param settings of pgbouncer.ini, over those here
 */
export async function startPgBouncer(
  url: string,
  settings: Record<string, string | number> = {},
): Promise<PgBouncer> {
  const { hostname, username, password, port: serverPort } = new URL(url);
  const listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
  const { port } = listener.addr as Deno.NetAddr;
  listener.close();
  const pooled = new URL(url);
  pooled.host = `127.0.0.1:${port}`;
  pooled.search = "?prepare=false";
  const folder = await Deno.makeTempDir();
  const lines = Object.entries({
    ...{ listen_addr: "127.0.0.1", listen_port: port, unix_socket_dir: "", auth_type: "any" },
    ...{ pool_mode: "transaction", default_pool_size: 5, admin_users: username, ...settings },
  }).map(([name, value]) => `${name} = ${value}\n`);
  await Deno.writeTextFile(
    `${folder}/pgbouncer.ini`,
    `[databases]
* = host=${hostname} port=${serverPort} user=${username} password=${password}
[pgbouncer]
${lines.join("")}`,
  );
  await Deno.chmod(folder, 0o755);
  let log = "";
  let end = () => Promise.resolve();
  const start = async () => {
    const child = new Deno.Command(PATH!, {
      args: [`${folder}/pgbouncer.ini`],
      stdin: "null",
      stdout: "null",
      stderr: "piped",
      ...(Deno.uid() === 0 ? { uid: 65534, gid: 65534 } : {}),
    }).spawn();
    const from = log.length;
    const reading = (async () => {
      for await (const text of child.stderr.pipeThrough(new TextDecoderStream())) log += text;
    })();
    end = async () => {
      end = () => Promise.resolve();
      child.kill("SIGKILL");
      await child.status;
      await reading;
    };
    await waitFor(() => log.slice(from).includes("process up"), "PgBouncer to start").catch(
      (error) => {
        throw new Error(`${error.message}: ${log}`);
      },
    );
  };
  await start();
  const console = new URL(pooled);
  console.pathname = "/pgbouncer";
  return {
    url: pooled.href,
    console: console.href,
    log: () => log,
    start,
    stop: () => end(),
    async [Symbol.asyncDispose]() {
      await end();
      await Deno.remove(folder, { recursive: true });
    },
  };
}
