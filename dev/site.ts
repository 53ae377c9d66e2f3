/** The site as a process of its own, for the tests and tools. */
import { signInLink } from "../web/auth.ts";
import { type Script, startScript } from "./scripts.ts";

/** How long a site may take until it listens. */
const START_MS = 20_000;
/** What it is started with, unless `env` has others. */
export const secrets = {
  admin: "an-admin-token-for-the-tests-only-0001",
  session: "a-session-secret-for-the-tests-only-01",
};

/** A site that listens. */
export interface RunningSite extends Script {
  /** Such as http://127.0.0.1:34567, without a slash at the end. */
  address: string;
  adminToken: string;
  /** Asks for a path, as the admin unless another `token` is given, or as nobody by null. */
  ask(path: string, init?: RequestInit & { token?: string | null }): Promise<Response>;
  /** Signs the admin in. @returns what a browser would send as its cookie from then on */
  signIn(): Promise<string>;
}

/**
 * Starts web.ts on any free port and waits until it listens.
 *
 * @param args more flags, such as `--submits-per-minute 5`
 * @param env more variables, such as SIDING_WEBHOOK_SECRET
 * @param denoArgs more flags of `deno run`
 */
export async function startSite(
  url: string,
  args: string[] = [],
  env: Record<string, string> = {},
  denoArgs: string[] = [],
): Promise<RunningSite> {
  const script = startScript("web.ts", ["--port", "0", "--host", "127.0.0.1", ...args], {
    DATABASE_URL: url,
    SIDING_ADMIN_TOKEN: secrets.admin,
    SIDING_SESSION_SECRET: secrets.session,
    ...env,
  }, ["--v8-flags=--optimize-for-size", ...denoArgs]); // as `deno task web` does
  const port = await portOf(script);
  const address = `http://127.0.0.1:${port}`;
  return {
    ...script,
    address,
    adminToken: secrets.admin,
    ask(path, { token = secrets.admin, headers, ...init } = {}) {
      const all = new Headers(headers);
      if (token !== null) all.set("authorization", `Bearer ${token}`);
      return fetch(address + path, { ...init, headers: all });
    },
    async signIn() {
      const reply = await fetch(address + await signInLink(secrets), { redirect: "manual" });
      await reply.body?.cancel();
      const [cookie] = reply.headers.getSetCookie();
      if (!cookie) throw new Error(`signing in: ${reply.status}`);
      return cookie.split(";")[0];
    },
  };
}

async function portOf(script: Script): Promise<string> {
  let code: number | undefined;
  script.ended.then((ended) => code = ended);
  const endMs = performance.now() + START_MS;
  for (;;) {
    const port = /listening on port (\d+)/.exec(script.log())?.[1];
    if (port) return port;
    if (code !== undefined) throw new Error(`the site ended with ${code}: ${script.log()}`);
    if (performance.now() > endMs) throw new Error(`the site does not listen: ${script.log()}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
