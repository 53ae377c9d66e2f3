/**
 * Tells a team's own system that its job has ended: a POST as the Standard Webhooks scheme has it,
 * signed with the owner's secret. It is a job of its own, put in the queue `webhooks` by the statement
 * that ended the other one (siding.tell), and tried again for a day.
 *
 * At least once: a worker that dies after the receiver's answer sends it again, with the same
 * webhook-id. Signed with SIDING_WEBHOOK_SECRET, which the site needs too. Never to an address that
 * is not public, unless SIDING_WEBHOOK_PRIVATE=true.
 */
import { createHmac } from "node:crypto";
import { lookup } from "node:dns/promises";
import http from "node:http";
import https from "node:https";
import ipaddr from "ipaddr.js";
import { z } from "zod";
import { codeOf } from "../db.ts";
import type { JobView } from "../queue.ts";
import { type Context, inline, PermanentFailure } from "./kind.ts";

/** How long a receiver may take, its name's look-up included. */
const LIMIT_MS = 15_000;
/** The refusals after which another try may fare better. */
const TRY_AGAIN = [408, 409, 425, 429];

export const webhook = inline({
  payload: z.object({ job: z.string(), url: z.url({ protocol: /^https?$/ }) }),
  internal: true,
  timeoutS: 60,
  retries: 29, // after 10, 30, 90, 270, 810 and 2430 s, and then every hour: a day in all
  work: tell,
});

/** The secret with which an owner's webhooks are signed, as a receiver's library takes it. */
export function webhookSecretOf(master: string, owner: string | null): string {
  return `whsec_${createHmac("sha256", master).update(owner ?? "").digest("base64")}`;
}

async function tell({ job: id, url }: { job: string; url: string }, context: Context) {
  const master = Deno.env.get("SIDING_WEBHOOK_SECRET") ?? "";
  if (master.length < 32) {
    throw new PermanentFailure(
      "SIDING_WEBHOOK_SECRET is not set on this worker, with at least 32 characters: it signs webhooks",
    );
  }
  const startedMs = performance.now();
  // Read now: a result may be as large as 1 MiB, and a job that has ended does not change.
  const job = await context.view(id);
  if (!job) throw new PermanentFailure(`job ${id} is not there any more`);
  const body = bodyOf(job);
  // By the database's clock: a receiver refuses what is minutes off.
  const atMs = context.job.claimed_at.getTime() + performance.now() - startedMs;
  const headers = signed(webhookSecretOf(master, job.owner), context.job.id, atMs, body);
  const signal = AbortSignal.any([context.signal, AbortSignal.timeout(LIMIT_MS)]);
  const status = await post(new URL(url), headers, body, signal).catch((error) => {
    if (signal.aborted && !context.signal.aborted) {
      throw new Error(`the receiver did not answer within ${LIMIT_MS / 1000} s`);
    }
    throw error;
  });
  if (status >= 200 && status < 300) return { status };
  const message = `the receiver answered ${status}`;
  throw status >= 400 && status < 500 && !TRY_AGAIN.includes(status)
    ? new PermanentFailure(message)
    : new Error(message);
}

function bodyOf(job: JobView): string {
  const { id, kind, queue, owner, status, result, error, created_at, finished_at } = job;
  return JSON.stringify({
    type: `job.${status}`,
    timestamp: finished_at,
    data: { id, kind, queue, owner, status, result, error, created_at, finished_at },
  });
}

/** The headers of the Standard Webhooks scheme. `webhook-id` is the same at each try. */
function signed(secret: string, id: string, atMs: number, body: string) {
  const name = `msg_${id}`;
  const timestamp = String(Math.floor(atMs / 1000));
  const mac = createHmac("sha256", Uint8Array.fromBase64(secret.slice("whsec_".length)))
    .update(`${name}.${timestamp}.${body}`).digest("base64");
  return {
    "content-type": "application/json",
    "user-agent": "Siding",
    "webhook-id": name,
    "webhook-timestamp": timestamp,
    "webhook-signature": `v1,${mac}`,
  };
}

/**
 * Posts to the very addresses that were checked, and follows nothing.
 *
 * @param find looks a name up
 * @returns the status of the answer
 * @throws PermanentFailure when an address of the URL's host is not public
 */
export async function post(
  url: URL,
  headers: Record<string, string>,
  body: string,
  signal: AbortSignal,
  find = (name: string): Promise<Address[]> => lookup(name, { all: true }),
): Promise<number> {
  const name = url.hostname.replace(/^\[|\]$/g, ""); // around an IPv6 address
  const addresses = await addressesOf(name, find, signal);
  const options = {
    method: "POST",
    headers: { ...headers, "content-length": String(new TextEncoder().encode(body).length) },
    agent: false, // a kept connection could be to an address of before
    signal,
    // In place of a second look-up, whose answer may be another one.
    lookup: (_: string, __: unknown, found: (error: null, all: Address[]) => void) =>
      found(null, addresses),
  };
  const { promise, resolve, reject } = Promise.withResolvers<number>();
  const send = url.protocol === "https:" ? https.request : http.request;
  const request = send(url, options as https.RequestOptions, (response) => {
    resolve(response.statusCode ?? 0);
    response.destroy(); // what else it says is of no interest
  });
  request.on("error", reject);
  request.end(body);
  return await promise;
}

type Address = { address: string; family: number };

/** The addresses of a name. @throws PermanentFailure when one of them is not public */
async function addressesOf(
  name: string,
  find: (name: string) => Promise<Address[]>,
  signal: AbortSignal,
): Promise<Address[]> {
  const late = new Promise<never>((_, reject) =>
    signal.addEventListener("abort", () => reject(signal.reason), { once: true })
  );
  const addresses = await Promise.race([find(name), late]).catch((error) => {
    throw signal.aborted ? error : new Error(`"${name}" was not found (${codeOf(error)})`);
  });
  if (Deno.env.get("SIDING_WEBHOOK_PRIVATE") === "true") return addresses;
  for (const { address } of addresses) {
    if (!isPublic(address)) {
      throw new PermanentFailure(
        `"${name}" is at ${address}, which is not a public address: webhooks go to those only`,
      );
    }
  }
  return addresses;
}

/** Of IPv6 what is given to the public so far: what else there is leads to IPv4 by detours, or inside. */
const GIVEN = ipaddr.IPv6.parseCIDR("2000::/3");

/** Whether anybody on the internet could have this address. IPv4 in IPv6 counts as what it is. */
export function isPublic(text: string): boolean {
  const address = ipaddr.process(text);
  return address.range() === "unicast" &&
    (address.kind() === "ipv4" || (address as ipaddr.IPv6).match(GIVEN));
}
