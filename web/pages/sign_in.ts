/** Signing in, by the admin's token, a key of the API or a link that `dev` printed, and out. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import {
  addressOf,
  assertCsrf,
  endSession,
  isSignInLink,
  session,
  signedIn,
  spend,
  startSession,
  whoHas,
} from "../auth.ts";
import { Problem } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { formOf } from "./forms.ts";
import { show } from "./layout.ts";

export function signIn(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/sign-in", async (c) => {
    const to = localPath(c.req.query("to"));
    const link = c.req.query("link");
    if (link !== undefined) {
      await spend(site.limits.signIn, addressOf(c), "attempts to sign in");
      if (!await isSignInLink(site, link)) {
        return await form(c, to, "This link is not good any more.", 401);
      }
      await startSession(site, c, { admin: true, owner: null, key: null });
      return c.redirect(to, 303);
    }
    if (await signedIn(site, c)) return c.redirect(to, 303);
    // A browser that comes by a link of another site leaves a strict cookie at home. From here on
    // it comes from this site, and brings it.
    if (c.req.header("sec-fetch-site") === "cross-site") {
      c.header("refresh", `0;url=/sign-in?to=${encodeURIComponent(to)}`);
    }
    return await form(c, to);
  });
  app.post("/sign-in", async (c) => {
    // There is no session whose token the form could carry: the browser itself says whose form it is.
    const from = c.req.header("sec-fetch-site") ?? "same-origin";
    if (from !== "same-origin" && from !== "none") {
      throw new Problem(403, "this form is not of this site");
    }
    await spend(site.limits.signIn, addressOf(c), "attempts to sign in");
    const { token = "", to } = await formOf(c);
    const who = await whoHas(site, token.trim());
    if (!who) return await form(c, localPath(to), "That is neither the token nor a key.", 401);
    await startSession(site, c, who);
    return c.redirect(localPath(to), 303);
  });
  app.post("/sign-out", session(site), async (c) => {
    await assertCsrf(c, (await formOf(c)).csrf);
    endSession(c);
    return c.redirect("/sign-in", 303);
  });
  return app;
}

/** A path of this site, and nowhere else. */
export function localPath(to: string | undefined): string {
  const base = "http://site.invalid";
  const url = to?.startsWith("/") && URL.canParse(to, base) ? new URL(to, base) : null;
  // Also `//elsewhere`, and what a browser reads as that.
  if (url?.origin !== base || url.pathname.startsWith("//")) return "/";
  return url.pathname + url.search;
}

function form(c: Context<Env>, to: string, problem?: string, status = 200) {
  return show(c, {
    title: "Sign in",
    body: html`
      <section class="card narrow">
        <h1>Sign in</h1>
        ${problem && html`
          <p class="problem" role="alert" id="problem">${problem}</p>
        `}
        <form method="post" action="/sign-in" class="fields">
          <input type="hidden" name="to" value="${to}" />
          <label for="token">Admin token or API key</label>
          <input id="token" name="token" type="password" required autofocus
            autocomplete="current-password" spellcheck="false"
            ${problem ? html`aria-invalid="true" aria-describedby="problem"` : ""} />
          <p class="hint">The admin sees everything. With a key, <code>siding_…</code>, you see the jobs of its owner.</p>
          <button>Sign in</button>
        </form>
      </section>
    `,
  }, status);
}
