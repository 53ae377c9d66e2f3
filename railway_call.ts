/**
 * One call of Railway's API, and how it can fail. A failure carries Railway's own words, which tell
 * a refused token from a refused query where the HTTP status does not, and never the token.
 */
import { z } from "zod";
import { UsageError } from "./config.ts";
import { cut, describe } from "./db.ts";
import { hide } from "./redact.ts";

export const RAILWAY_URL = "https://backboard.railway.com/graphql/v2";

/** How long a call may take. */
const LIMIT_MS = 10_000;
export const HOUR_MS = 3_600_000;
/** When a 429 does not say how long to wait. */
const RETRY_AFTER_MS = 60_000;
/** As much of what Railway says as is passed on. */
const MESSAGE_BYTES = 1000;

/** Why a call failed. */
export type Reason =
  /** The token is refused, or an id: Railway does not tell one from the other. */
  | "unauthorized"
  /** The operation does not fit the schema, which has changed. */
  | "invalid"
  /** Railway understood, and will not: more replicas than the plan has, for example. */
  | "refused"
  /** Too many calls: Railway's limit, or the budget kept here. */
  | "limited"
  /** A failure of Railway's own. */
  | "unavailable"
  /** No connection, one that broke, or no reply in time. A write may have taken effect. */
  | "unreachable"
  /** A reply that is none of Railway's, or that lacks what was asked for. */
  | "unexpected"
  /** What is there does not go with our settings. */
  | "settings";

/** A call that failed. Its message is Railway's own where there is one, without the token. */
export class RailwayError extends Error {
  override name = "RailwayError";

  constructor(
    readonly reason: Reason,
    message: string,
    /** Railway's code, the HTTP status, and when a call may succeed again. */
    readonly about: { code?: string; status?: number; retryAfterMs?: number } = {},
  ) {
    super(message);
  }

  /** Railway's code, else "". */
  get code(): string {
    return this.about.code ?? "";
  }
}

/** A project's token, or an account's or workspace's: they go in different headers. */
export type Token = { project: string } | { account: string };

/** The token of RAILWAY_TOKEN (a project's) or RAILWAY_API_TOKEN, as Railway's own tool reads them. */
export function tokenFrom(env: { get(name: string): string | undefined }): Token | undefined {
  for (const [name, kind] of [["RAILWAY_TOKEN", "project"], ["RAILWAY_API_TOKEN", "account"]]) {
    const value = env.get(name);
    if (!value) continue;
    // Not the value: it is a secret.
    if (!/^[\w.~+/=:-]{8,}$/.test(value)) {
      throw new UsageError(`${name} does not look like a token`);
    }
    hide(value);
    return { [kind]: value } as Token;
  }
}

/** How calls are made. */
export interface Transport {
  url?: string;
  token?: Token;
  limitMs?: number;
  /** Ends what is under way. */
  signal?: AbortSignal;
}

const Body = z.object({
  data: z.unknown().optional(),
  errors: z.array(z.object({
    message: z.string(),
    extensions: z.object({ code: z.string() }).optional().catch(undefined),
  })).nullish(),
});

/** Sends one operation. @returns its data, whole; throws a {@linkcode RailwayError} else */
export async function send(
  operation: string,
  variables: Record<string, unknown>,
  { url = RAILWAY_URL, token, limitMs = LIMIT_MS, signal }: Transport,
): Promise<unknown> {
  const secret = token && Object.values(token)[0];
  const failure = (reason: Reason, message: string, about = {}) => {
    const clean = secret ? message.replaceAll(secret, "…") : message;
    return new RailwayError(reason, cut(clean, MESSAGE_BYTES), about);
  };
  // A connection each: fetch would send a mutation again by itself when a pooled one breaks.
  using client = Deno.createHttpClient({ poolMaxIdlePerHost: 0 });
  const limit = AbortSignal.timeout(limitMs);
  let response: Response, text: string;
  try {
    response = await fetch(url, {
      method: "POST",
      headers: { "content-type": "application/json", ...(token && headersOf(token)) },
      body: JSON.stringify({ query: operation, variables }),
      redirect: "manual",
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
      client,
    });
    text = await response.text();
  } catch (error) {
    if (signal?.aborted) throw signal.reason;
    if (limit.aborted) {
      throw failure("unreachable", `Railway did not reply within ${limitMs / 1000} s`);
    }
    const cause = (error as Error).cause ?? error;
    throw failure("unreachable", `Railway could not be reached: ${describe(cause)}`);
  }
  const { data, errors } = Body.safeParse(parsed(text)).data ?? {};
  // Any error means no data, whatever stands beside it.
  if (response.ok && data && !errors?.length) return data;
  const { status } = response;
  const said = errors?.map((error) => error.message).join("; ");
  const code = errors?.find((error) => error.extensions)?.extensions?.code;
  const reason = reasonOf(status, said, code);
  throw failure(reason, said ? `Railway: ${said}` : `Railway replied ${status} and no data`, {
    code,
    status,
    retryAfterMs: reason === "limited" ? retryAfterMs(response) : undefined,
  });
}

function headersOf(token: Token): Record<string, string> {
  return "project" in token
    ? { "project-access-token": token.project }
    : { authorization: `Bearer ${token.account}` };
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Message and code come first: Railway refuses a token with HTTP 400, as a query, and with 200. */
function reasonOf(status: number, said = "", code = ""): Reason {
  if (status === 429) return "limited";
  if (/^GRAPHQL_(VALIDATION|PARSE)_FAILED$/.test(code)) return "invalid";
  const refused = /not authorized|unauthorized|token not found|invalid token/i.test(said);
  if (refused || /^(UNAUTHENTICATED|FORBIDDEN)$/.test(code) || status === 401) {
    return "unauthorized";
  }
  if (status >= 500) return "unavailable";
  return said ? "refused" : "unexpected";
}

/** How long a 429 says to wait: seconds, or until a date. */
function retryAfterMs({ headers }: Response): number {
  const value = headers.get("retry-after") ?? "";
  const ms = /^\d+$/.test(value) ? Number(value) * 1000 : Date.parse(value) - Date.now();
  return Number.isNaN(ms) ? RETRY_AFTER_MS : Math.min(Math.max(ms, 1000), HOUR_MS);
}
