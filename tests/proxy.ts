/** A TCP proxy before the database, which a test can cut or let fall silent. */

export interface Proxy extends AsyncDisposable {
  /** The database's URL by way of the proxy. */
  url: string;
  /** Closes all connections and refuses new ones, as a server that is down. */
  cut(): void;
  /** Keeps all connections and swallows what comes, as a peer that is gone without a word. */
  silence(): void;
  /** Passes everything on again. Connections that fell silent stay so. */
  mend(): void;
  /**
   * Passes on the statement with this text in it, and swallows what comes back for its execution.
   * The driver first has a statement described; what executes it is its next message.
   */
  swallowReplyTo(text: string): void;
}

/** Starts a proxy to the database at `url`. */
export function startProxy(url: string): Proxy {
  const target = new URL(url);
  const connections = new Set<Deno.Conn>();
  let listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
  const { port } = listener.addr as Deno.NetAddr;
  let silent = false;
  let trigger = "";
  let tasks: Promise<unknown>[] = [];

  const pass = async (
    from: Deno.Conn,
    to: Deno.Conn,
    mute: () => boolean,
    heard: (bytes: Uint8Array) => void = () => {},
  ) => {
    const buffer = new Uint8Array(65_536);
    try {
      for (let n = await from.read(buffer); n !== null; n = await from.read(buffer)) {
        if (mute()) continue;
        heard(buffer.subarray(0, n));
        for (let at = 0; at < n;) at += await to.write(buffer.subarray(at, n));
      }
    } catch {
      // Closed on one side: the other follows.
    }
    for (const conn of [from, to]) close(conn);
  };
  const close = (conn: Deno.Conn) => {
    if (connections.delete(conn)) conn.close();
  };
  const accept = async (server: Deno.TcpListener) => {
    for await (const client of server) {
      connections.add(client);
      let mute = false;
      const muted = () => mute ||= silent;
      tasks.push((async () => {
        const upstream = await Deno.connect({
          hostname: target.hostname,
          port: Number(target.port),
        });
        connections.add(upstream);
        let described = false;
        let unanswered = false;
        const hear = (bytes: Uint8Array) => {
          unanswered ||= described;
          if (trigger === "" || !new TextDecoder().decode(bytes).includes(trigger)) return;
          trigger = "";
          described = true;
        };
        await Promise.all([
          pass(client, upstream, muted, hear),
          pass(upstream, client, () => unanswered || muted()),
        ]);
      })());
    }
  };
  tasks.push(accept(listener));

  const proxied = new URL(url);
  proxied.port = String(port);
  let listening = true;
  const cut = () => {
    if (listening) listener.close();
    listening = false;
    for (const conn of [...connections]) close(conn);
  };
  return {
    url: proxied.href,
    cut,
    silence: () => silent = true,
    swallowReplyTo: (text) => trigger = text,
    mend() {
      silent = false;
      if (listening) return;
      listener = Deno.listen({ hostname: "127.0.0.1", port });
      listening = true;
      tasks.push(accept(listener));
    },
    async [Symbol.asyncDispose]() {
      cut();
      await Promise.all(tasks);
      tasks = [];
    },
  };
}
