// A canvas that shows one slice: image below, edits as fill, masks as outlines. No library, nothing from elsewhere.
const PALETTE = [[230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0], [204, 121, 167]];
const ADDED = [70, 140, 230], REMOVED = [232, 84, 48], RELABELED = [204, 121, 167];
const CHANNEL = { m0: 0, adapted: 1, deployed: 2 };
const OUTLINE = { m0: "#f0c64a", adapted: "#3fd6c2", deployed: "#ffffff" };
const WIDTH = { deployed: 4.4, m0: 2.8, adapted: 1.3 }; // drawn in this order, so that all three can be seen on one line
const REMEMBERED = 80;

export class Viewer {
  constructor(canvas, { moved, failed }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.layers = { m0: true, adapted: true, deployed: false, edits: true, classes: false };
    this.opacity = 0.5;
    this.background = true; // label 0 is not a class
    this.colors = new Map(); // of classes, by label
    this.moved = moved;
    this.failed = failed;
    this.loaded = new Map();
    this.case = null;
    this.reset();
    new ResizeObserver(() => this.paint()).observe(canvas);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.drag(event));
    canvas.addEventListener("dblclick", () => { this.reset(); this.paint(); });
  }

  reset() { this.zoom = 1; this.center = [0.5, 0.5]; }

  async open(detail, address) {
    this.case = detail;
    this.address = address; // (kind, axis, slice) -> URL
    this.axis = 0;
    this.region = null;
    this.frame = null;
    this.loaded.clear();
    this.reset();
    this.wheeled = 0;
    const changes = detail.changes[0];
    await this.go(this.isVolume ? changes.indexOf(Math.max(...changes)) : 0);
  }

  get isVolume() { return this.case !== null && this.case.shape.length === 3; }
  get slices() { return this.isVolume ? this.case.shape[this.axis] : 1; }
  get planeAxes() { return this.isVolume ? [0, 1, 2].filter((axis) => axis !== this.axis) : [0, 1]; }

  async turn(axis) {
    if (!this.isVolume) return;
    this.axis = axis;
    this.reset();
    const changes = this.case.changes[axis];
    await this.go(this.region ? this.region.at[axis] : changes.indexOf(Math.max(...changes)));
  }

  async jump(region) {
    this.region = region;
    await this.go(this.isVolume ? region.at[this.axis] : 0);
  }

  async go(slice) {
    if (this.case === null) return;
    this.slice = Math.max(0, Math.min(this.slices - 1, slice));
    this.moved();
    await this.refresh();
    for (const near of [this.slice + 1, this.slice - 1]) if (near >= 0 && near < this.slices) this.fetched(near).catch(() => {});
  }

  async refresh() { // only the last slice that was asked for is painted, however the answers arrive
    const wanted = [this.case, this.axis, this.slice].join();
    const detail = this.case;
    try {
      const frame = await this.fetched(this.slice);
      if (detail === this.case && wanted === [this.case, this.axis, this.slice].join()) { this.frame = frame; this.paint(); }
    } catch (error) {
      if (detail === this.case) this.failed(error.message);
    }
  }

  forgetImages() { this.loaded.clear(); return this.refresh(); }

  fetched(slice) {
    const key = `${this.axis}/${slice}`;
    if (!this.loaded.has(key)) {
      const frame = this.load(this.axis, slice);
      frame.catch(() => this.loaded.delete(key));
      this.loaded.set(key, frame);
      if (this.loaded.size > REMEMBERED) this.loaded.delete(this.loaded.keys().next().value);
    }
    return this.loaded.get(key);
  }

  async load(axis, slice) {
    const shown = this.case.image_problem === null;
    const [masks, image] = await Promise.all([
      picture(this.address("masks", axis, slice)),
      shown ? picture(this.address("image", axis, slice)) : null,
    ]);
    const sheet = new OffscreenCanvas(masks.width, masks.height).getContext("2d", { willReadFrequently: true });
    sheet.drawImage(masks, 0, 0);
    return { image, width: masks.width, height: masks.height, labels: sheet.getImageData(0, 0, masks.width, masks.height).data, outlines: {} };
  }

  // Where the slice lies on the canvas, in device pixels; voxels keep their proportions.
  placement() {
    const { width, height } = this.frame;
    const spacing = this.case.spacing_mm;
    const [down, across] = spacing ? this.planeAxes.map((axis) => spacing[axis] || 1) : [1, 1];
    const fit = Math.min(this.canvas.width / (width * across), this.canvas.height / (height * down)) * this.zoom;
    const x = fit * across, y = fit * down;
    return { x, y, left: this.canvas.width / 2 - this.center[0] * width * x, top: this.canvas.height / 2 - this.center[1] * height * y };
  }

  paint() {
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.round(this.canvas.clientWidth * ratio), high = Math.round(this.canvas.clientHeight * ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) { this.canvas.width = wide; this.canvas.height = high; }
    const context = this.context;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = "#0d0f11";
    context.fillRect(0, 0, wide, high);
    if (!this.frame) return;
    const place = this.placement(), { width, height } = this.frame;
    const box = [place.left, place.top, width * place.x, height * place.y];
    if (this.frame.image) {
      context.imageSmoothingEnabled = place.x < 6;
      context.drawImage(this.frame.image, ...box);
    } else {
      context.fillStyle = "#1a1e22";
      context.fillRect(...box);
    }
    context.imageSmoothingEnabled = false;
    const fill = this.filled();
    if (fill) context.drawImage(fill, ...box);
    for (const name of ["deployed", "m0", "adapted"]) if (this.layers[name]) this.stroke(name, place, ratio);
    if (this.region) this.ring(place, ratio);
    this.canvas.dataset.painted = `${this.axis}/${this.slice}`;
  }

  color(label) { return this.colors.get(label) || PALETTE[(label + PALETTE.length - 1) % PALETTE.length]; }

  filled() {
    const { width, height, labels } = this.frame;
    const top = ["adapted", "deployed", "m0"].find((name) => this.layers[name]) || "m0";
    if (!this.layers.edits && !this.layers.classes) return null;
    const sheet = new OffscreenCanvas(width, height), context = sheet.getContext("2d");
    const pixels = context.createImageData(width, height), alpha = Math.round(255 * this.opacity);
    for (let at = 0; at < labels.length; at += 4) {
      const source = labels[at], adapted = labels[at + (this.case.state === null ? CHANNEL.deployed : CHANNEL.adapted)];
      let color = null;
      if (this.layers.edits && source !== adapted) color = !this.background ? RELABELED : source === 0 ? ADDED : adapted === 0 ? REMOVED : RELABELED;
      else if (this.layers.classes && (labels[at + CHANNEL[top]] > 0 || !this.background)) color = this.color(labels[at + CHANNEL[top]]);
      if (color) { pixels.data.set(color, at); pixels.data[at + 3] = alpha; }
    }
    context.putImageData(pixels, 0, 0);
    return sheet;
  }

  outline(name) { // the borders between labels, once a slice
    const { width, height, labels, outlines } = this.frame;
    if (outlines[name]) return outlines[name];
    const path = new Path2D(), channel = CHANNEL[name];
    const label = (row, column) => (row < 0 || column < 0 || row >= height || column >= width ? 0 : labels[4 * (row * width + column) + channel]);
    for (let row = 0; row <= height; row += 1) {
      for (let column = 0; column <= width; column += 1) {
        const here = label(row, column);
        if (here !== label(row - 1, column) && column < width) { path.moveTo(column, row); path.lineTo(column + 1, row); }
        if (here !== label(row, column - 1) && row < height) { path.moveTo(column, row); path.lineTo(column, row + 1); }
      }
    }
    outlines[name] = path;
    return path;
  }

  stroke(name, place, ratio) {
    const path = new Path2D(), context = this.context;
    path.addPath(this.outline(name), new DOMMatrix([place.x, 0, 0, place.y, place.left, place.top]));
    context.lineCap = "square";
    context.setLineDash([]);
    context.lineWidth = WIDTH[name] * ratio;
    context.strokeStyle = OUTLINE[name];
    context.globalAlpha = name === "deployed" ? 0.75 : 1;
    context.stroke(path);
    context.globalAlpha = 1;
  }

  ring(place, ratio) {
    const [down, across] = this.planeAxes, box = this.region.box;
    if (this.isVolume && (this.slice < box[this.axis][0] || this.slice > box[this.axis][1])) return;
    const gap = 5 * ratio, context = this.context;
    const left = place.left + box[across][0] * place.x - gap, top = place.top + box[down][0] * place.y - gap;
    const wide = (box[across][1] - box[across][0] + 1) * place.x + 2 * gap, high = (box[down][1] - box[down][0] + 1) * place.y + 2 * gap;
    context.lineWidth = 1.5 * ratio;
    context.setLineDash([6 * ratio, 4 * ratio]);
    context.strokeStyle = "#ffffff";
    context.strokeRect(left, top, wide, high);
    context.setLineDash([]);
  }

  enlarge(factor, event) {
    if (!this.frame) return;
    const place = this.placement(), ratio = window.devicePixelRatio || 1;
    const bounds = this.canvas.getBoundingClientRect();
    const at = event ? [(event.clientX - bounds.left) * ratio, (event.clientY - bounds.top) * ratio] : [this.canvas.width / 2, this.canvas.height / 2];
    const spot = [(at[0] - place.left) / (place.x * this.frame.width), (at[1] - place.top) / (place.y * this.frame.height)];
    this.zoom = Math.max(1, Math.min(40, this.zoom * factor));
    if (this.zoom === 1) this.reset();
    else {
      const next = this.placement();
      this.center = [
        this.center[0] + (next.left + spot[0] * next.x * this.frame.width - at[0]) / (next.x * this.frame.width),
        this.center[1] + (next.top + spot[1] * next.y * this.frame.height - at[1]) / (next.y * this.frame.height),
      ];
    }
    this.paint();
  }

  wheel(event) {
    event.preventDefault();
    if (event.ctrlKey || !this.isVolume) { this.enlarge(event.deltaY < 0 ? 1.2 : 1 / 1.2, event); return; }
    this.wheeled = Math.sign(this.wheeled) === Math.sign(event.deltaY) ? this.wheeled + event.deltaY : event.deltaY;
    const unit = event.deltaMode === 0 ? 40 : 1, steps = Math.trunc(this.wheeled / unit); // a touchpad sends many small ones
    this.wheeled -= steps * unit;
    if (steps) this.go(this.slice + Math.sign(steps) * Math.min(3, Math.abs(steps)));
  }

  drag(event) {
    if (!this.frame || this.zoom === 1) return;
    const start = [event.clientX, event.clientY], center = [...this.center], ratio = window.devicePixelRatio || 1;
    const place = this.placement();
    const move = (now) => {
      this.center = [
        center[0] - ((now.clientX - start[0]) * ratio) / (place.x * this.frame.width),
        center[1] - ((now.clientY - start[1]) * ratio) / (place.y * this.frame.height),
      ];
      this.paint();
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", () => this.canvas.removeEventListener("pointermove", move), { once: true });
  }
}

async function picture(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error((await answer.json()).error);
  return createImageBitmap(await answer.blob(), { colorSpaceConversion: "none", premultiplyAlpha: "none" });
}
