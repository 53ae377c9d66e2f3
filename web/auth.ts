/**
 * Who may: the admin by a token, an owner by a key of the API (keys.ts). A program sends either as
 * `Authorization: Bearer …`; a person signs in with it once and then has a cookie, which is signed, lasts
 * {@linkcode SESSION_S}, and is good for reading alone: every form carries a token of its own besides.
 */
import { timingSafeEqual } from "node:crypto";
import type { Context, MiddlewareHandler } from "hono";
import { deleteCookie, getSignedCookie, setSignedCookie } from "hono/cookie";
import { getConnInfo } from "hono/deno";
import type { RateLimiterMemory, RateLimiterRes } from "rate-limiter-flexible";
import { findKey, keyById } from "../keys.ts";
import { Problem } from "./problem.ts";
import type { Env, Site, Who } from "./site.ts";

export const SESSION_S = 7 * 86_400;
/** How long the link that `dev` prints is good for. */
const LINK_S = 86_400;
const COOKIE = "siding_session";
const admin: Who = { admin: true, owner: null, key: null };

const encoder = new TextEncoder();
const sha256 = async (text: string) =>
  new Uint8Array(await crypto.subtle.digest("SHA-256", encoder.encode(text)));

/** Compares in a time that says nothing of where two texts differ, nor of how long they are. */
export async function sameText(a: string, b: string): Promise<boolean> {
  return timingSafeEqual(await sha256(a), await sha256(b));
}

/** HMAC-SHA-256 in base64url. */
async function sign(secret: string, text: string): Promise<string> {
  const key = await crypto.subtle.importKey(
    "raw",
    encoder.encode(secret),
    { name: "HMAC", hash: "SHA-256" },
    false,
    ["sign"],
  );
  const mac = new Uint8Array(await crypto.subtle.sign("HMAC", key, encoder.encode(text)));
  return mac.toBase64({ alphabet: "base64url", omitPadding: true });
}

/** What signs cookies: with the admin's token in it, so that a new token ends every session. */
const signingSecret = ({ secrets }: Site) => `${secrets.session}/${secrets.admin}`;

/** Who a token is, or null. */
export async function whoHas(site: Site, token: string): Promise<Who | null> {
  if (await sameText(token, site.secrets.admin)) return admin;
  const key = await site.db.run((sql) => findKey(sql, token));
  return key && { admin: false, owner: key.owner, key };
}

/** For the API: a bearer token, or 401. */
export function bearer(site: Site): MiddlewareHandler<Env> {
  return async (c, next) => {
    const [, token] = /^Bearer +(\S+)$/i.exec(c.req.header("authorization") ?? "") ?? [];
    // A page of the site asks with its cookie, and only reads so: see `session`.
    const who = token
      ? await whoHas(site, token)
      : /^(GET|HEAD)$/.test(c.req.method)
      ? (await signedIn(site, c))?.who
      : null;
    if (!who) {
      throw new Problem(401, "an API key or the admin's token is needed: Authorization: Bearer …");
    }
    c.set("who", who);
    await next();
  };
}

/** For pages: the signed-in, or off to the sign-in page. Checks the token of every form. */
export function session(site: Site): MiddlewareHandler<Env> {
  return async (c, next) => {
    const it = await signedIn(site, c);
    if (!it) {
      const { pathname, search } = new URL(c.req.url);
      return c.redirect(`/sign-in?to=${encodeURIComponent(pathname + search)}`, 303);
    }
    c.set("who", it.who);
    c.set("csrf", await csrfOf(site, it.value));
    await next();
  };
}

/** For pages that anybody may see: notes who signed in, if that can be told, for the page's frame. */
export async function noteWho(site: Site, c: Context<Env>): Promise<void> {
  const it = await signedIn(site, c).catch(() => null);
  if (!it) return;
  c.set("who", it.who);
  c.set("csrf", await csrfOf(site, it.value));
}

/** For what is the admin's alone; to others it is not there. */
export const adminOnly: MiddlewareHandler<Env> = async (c, next) => {
  if (!c.get("who").admin) throw new Problem(404, "there is no such page");
  await next();
};

/** Whoever the request's cookie says, if it still stands. */
export async function signedIn(
  site: Site,
  c: Context,
): Promise<{ who: Who; value: string } | null> {
  const value = await getSignedCookie(c, signingSecret(site), COOKIE);
  if (!value) return null;
  // Exactly: the tokens of forms are signed with the same secret, and are no sessions.
  const [, role, expires] = /^(admin|\d{1,18})\.(\d+)\.[\w-]+$/.exec(value) ?? [];
  if (!(Number(expires) > Date.now() / 1000)) return null;
  if (role === "admin") return { who: admin, value };
  const key = await site.db.run((sql) => keyById(sql, role)); // revoked, it ends the session
  return key && { who: { admin: false, owner: key.owner, key }, value };
}

/** Gives a browser the cookie of `who`. */
export async function startSession(site: Site, c: Context, who: Who): Promise<void> {
  const expires = Math.floor(Date.now() / 1000) + SESSION_S;
  const value = `${who.key?.id ?? "admin"}.${expires}.${crypto.randomUUID()}`;
  const { hostname } = new URL(c.req.url);
  await setSignedCookie(c, COOKIE, value, signingSecret(site), {
    httpOnly: true,
    sameSite: "Strict",
    path: "/",
    maxAge: SESSION_S,
    secure: !/^(localhost|127\.0\.0\.1|\[::1\])$/.test(hostname),
  });
}

export const endSession = (c: Context) => void deleteCookie(c, COOKIE, { path: "/" });

/** The token that the forms of one session carry. */
const csrfOf = (site: Site, value: string) => sign(signingSecret(site), `csrf ${value}`);

/** Throws unless a form came from a page of ours, for this session. */
export async function assertCsrf(c: Context<Env>, token: unknown): Promise<void> {
  if (typeof token !== "string" || !await sameText(token, c.get("csrf"))) {
    throw new Problem(
      403,
      "this form was not made for this session: reload the page and send it again",
    );
  }
}

/** A link that signs the admin in, for a day: what `dev` prints. */
export async function signInLink(secrets: { admin: string; session: string }): Promise<string> {
  const expires = Math.floor(Date.now() / 1000) + LINK_S;
  const signature = await sign(`${secrets.session}/${secrets.admin}`, `link ${expires}`);
  return `/sign-in?link=${expires}.${signature}`;
}

/** Whether a link of {@linkcode signInLink} is good. */
export async function isSignInLink(site: Site, link: string): Promise<boolean> {
  const [expires, signature = ""] = link.split(".");
  return Number(expires) > Date.now() / 1000 &&
    await sameText(signature, await sign(signingSecret(site), `link ${expires}`));
}

/** Where a request comes from. Railway's edge says so in a header, which is not believed elsewhere. */
export function addressOf(c: Context): string {
  const real = Deno.env.get("RAILWAY_ENVIRONMENT_ID") ? c.req.header("x-real-ip") : undefined;
  return real ?? getConnInfo(c).remote.address ?? "unknown";
}

/** Takes one of what a limit gives, or throws 429 that says when to come back. */
export async function spend(limiter: RateLimiterMemory, key: string, what: string): Promise<void> {
  try {
    await limiter.consume(key);
  } catch (left) {
    if (left instanceof Error) throw left;
    throw used(limiter, left as RateLimiterRes, what);
  }
}

/** Throws as {@linkcode spend} would, and takes nothing: before work that comes first. */
export async function assertLeft(
  limiter: RateLimiterMemory,
  key: string,
  what: string,
): Promise<void> {
  const left = await limiter.get(key);
  if (left && left.consumedPoints >= limiter.points) throw used(limiter, left, what);
}

function used(limiter: RateLimiterMemory, left: RateLimiterRes, what: string): Problem {
  const retryAfterS = Math.max(1, left.msBeforeNext / 1000);
  return new Problem(429, `${what}: more than ${limiter.points} in ${limiter.duration} s`, {
    retryAfterS,
  });
}
